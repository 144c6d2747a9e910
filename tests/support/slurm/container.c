/* Stands for pyxis and enroot, which are not to be had in CI: a plugin for Slurm that takes pyxis's
 * options of srun. The image is a folder, which becomes the root of the step's processes. As with
 * enroot, a container has a /tmp of its own and sees of the node's files what is mounted.
 *
 * gcc -shared -fPIC -o container.so container.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(container, 1);

enum { IMAGE, MOUNTS, WORKDIR, OPTIONS };
static char *given[OPTIONS];

static int keep(int option, const char *value, int remote) {
    (void)remote;
    given[option] = strdup(value);
    return ESPANK_SUCCESS;
}

static struct spank_option options[OPTIONS] = {
    {"container-image", "PATH", "folder with the root file system", 1, IMAGE, keep},
    {"container-mounts", "SOURCE:TARGET[:FLAGS],...", "what the container sees", 1, MOUNTS, keep},
    {"container-workdir", "PATH", "working directory in the container", 1, WORKDIR, keep},
};

int slurm_spank_init(spank_t spank, int argc, char **argv) {
    (void)argc;
    (void)argv;
    /* As those of pyxis, they are srun's and not sbatch's. */
    if (spank_context() != S_CTX_LOCAL && spank_context() != S_CTX_REMOTE) return ESPANK_SUCCESS;
    for (int option = 0; option < OPTIONS; option++)
        if (spank_option_register(spank, &options[option])) return ESPANK_ERROR;
    return ESPANK_SUCCESS;
}

static int fail(const char *what, const char *path) {
    slurm_error("container: %s %s: %s", what, path, strerror(errno));
    return ESPANK_ERROR;
}

/* Make a folder and those above it, or an empty file in such a folder. */
static int make(char *path, int is_folder) {
    for (char *end = strchr(path + 1, '/'); end; end = strchr(end + 1, '/')) {
        *end = 0;
        mkdir(path, 0755);
        *end = '/';
    }
    if (is_folder) return mkdir(path, 0755) && errno != EEXIST;
    FILE *file = fopen(path, "a");
    return !file || fclose(file);
}

static int bind(const char *source, const char *target, int read_only) {
    char path[8192];
    struct stat of_source;
    snprintf(path, sizeof path, "%s%s", given[IMAGE], target);
    if (stat(source, &of_source)) return fail("nothing to mount at", source);
    if (make(path, S_ISDIR(of_source.st_mode))) return fail("cannot make", path);
    if (mount(source, path, NULL, MS_BIND | MS_REC, NULL)) return fail("cannot mount", source);
    if (read_only && mount(NULL, path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL))
        return fail("cannot protect", path);
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv) {
    (void)spank;
    (void)argc;
    (void)argv;
    char tmp[8192], *rest = NULL;
    const char *of_the_node[] = {"/proc", "/sys", "/dev", "/etc/hosts", "/etc/resolv.conf"};
    if (!given[IMAGE]) return ESPANK_SUCCESS;
    if (access(given[IMAGE], R_OK)) return fail("no image", given[IMAGE]);
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL))
        return fail("no mounts of its own for", given[IMAGE]);
    for (size_t i = 0; i < sizeof of_the_node / sizeof *of_the_node; i++)
        if (bind(of_the_node[i], of_the_node[i], 0)) return ESPANK_ERROR;
    snprintf(tmp, sizeof tmp, "%s/tmp", given[IMAGE]);
    if (make(tmp, 1) || mount("tmpfs", tmp, "tmpfs", 0, NULL)) return fail("cannot mount", tmp);
    char *entry = given[MOUNTS] ? strtok_r(given[MOUNTS], ",", &rest) : NULL;
    for (; entry; entry = strtok_r(NULL, ",", &rest)) {
        char *target = strchr(entry, ':'), *flags = NULL;
        if (target) {
            *target++ = 0;
            if ((flags = strchr(target, ':'))) *flags++ = 0;
        }
        if (bind(entry, target ? target : entry, flags && strstr(flags, "ro"))) return ESPANK_ERROR;
    }
    if (chroot(given[IMAGE]) || chdir("/")) return fail("cannot enter", given[IMAGE]);
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
    (void)spank;
    (void)argc;
    (void)argv;
    if (given[IMAGE] && given[WORKDIR] && chdir(given[WORKDIR]))
        return fail("cannot work in", given[WORKDIR]);
    return ESPANK_SUCCESS;
}
