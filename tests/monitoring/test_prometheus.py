"""A step's metrics at the endpoint of a real Ray, scraped by a real Prometheus if there is one."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import REPOSITORY

STARTS = 3
"""How often Ray is started at most: it gives a node 30 s, too few on a busy machine."""
JOB = """
import sys
import ray
from nemo_specrl.monitoring.metrics_file import MetricsLog
from pathlib import Path
port, folder = int(sys.argv[1]), sys.argv[2]
ray.init("local", include_dashboard=False, log_to_driver=False, num_cpus=1,
         _metrics_export_port=port, _system_config={"metrics_report_interval_ms": 500})
log = MetricsLog(Path(folder) / "sort", 0, tensorboard=False)
for step in (1, 2):
    log.write({"step": step, "reward": 0.5, "rollout_s": 1.5, "spec_rl/cache_errors": 0.0})
print("written", flush=True)
sys.stdin.readline()
log.close()
ray.shutdown()
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def until(found, seconds=60):
    """Call ``found`` until it returns something; connections may be refused at first."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = found()
        except (urllib.error.URLError, ConnectionError):
            value = None
        if value or time.monotonic() > deadline:
            return value
        time.sleep(0.2)


@pytest.fixture(scope="module")
def endpoint(own_ray, tmp_path_factory):
    """Port of a Ray node on which a run has done two steps."""
    folder, port = tmp_path_factory.mktemp("run"), free_port()
    for _ in range(STARTS):
        job = subprocess.Popen(
            [sys.executable, "-c", JOB, str(port), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            text=True,
        )
        if job.stdout.readline() == "written\n":
            break
        job.communicate(timeout=60)
    else:
        pytest.fail("Ray did not start")
    try:
        yield port
    finally:
        job.communicate("\n", timeout=60)
    assert job.returncode == 0


def scraped(port, run, step):
    """Values at the endpoint of a run that has done so many steps, by name; None before."""
    families = text_string_to_metric_families(fetch(f"http://127.0.0.1:{port}/metrics"))
    values = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("run") == run
    }
    return values if values.get("ray_nemo_specrl_step") == step else None


def test_the_endpoint_has_the_names_of_the_textfile_behind_rays_prefix(endpoint):
    values = until(lambda: scraped(endpoint, "sort", 2))
    assert values.pop("ray_nemo_specrl_last_progress_timestamp_seconds") > 1e9
    assert values == {
        "ray_nemo_specrl_running": 1,
        "ray_nemo_specrl_step": 2,
        "ray_nemo_specrl_reward": 0.5,
        "ray_nemo_specrl_steps_total": 2,
        "ray_nemo_specrl_rollout_seconds_total": 3,
    }  # and no counter that is 0: Ray begins it with its first event


def test_prometheus_with_the_shipped_configuration_takes_the_prefix_off(endpoint, tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    config = yaml.safe_load((REPOSITORY / "examples/monitoring/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = []
    config["scrape_configs"] = config["scrape_configs"][:1]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{endpoint}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        query = urllib.parse.quote('max by (run) (nemo_specrl_step{run="sort"})')

        def answered():
            answer = json.loads(fetch(f"http://127.0.0.1:{port}/api/v1/query?query={query}"))
            return answer["data"]["result"]

        (result,) = until(answered)
        assert result["metric"] == {"run": "sort"} and result["value"][1] == "2"
    finally:
        server.terminate()
        server.wait(timeout=30)
