/* SuffixIndex: the earlier responses to one prompt, indexed by the tokens that precede each position.
 *
 * A response is a chain of nodes, one for each token, behind a start node. For each of a few context
 * lengths (ORDERS) a hash table leads from the last tokens of a context to the positions where they
 * occurred, newest first. To draft, the contexts of the last tokens are looked up, longest first, and the
 * positions found vote on each next token: those with a longer match with much more weight, and those in
 * the row's own response with more than those in others. Short contexts vote beside long ones because the
 * longest match is often a sibling that has not got further than this row.
 *
 * This does what a suffix tree bounded in depth does, in 60 to 150 bytes a token; responses are
 * extended at any time and in any order. Nothing is removed: the caller makes a new index.
 * The limited API of Python 3.11 is used, so that one build serves later versions, too.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ORDERS 5
static const int ORDER[ORDERS] = {1, 2, 4, 8, 16};
#define MAX_MATCH 48      /* context tokens compared beyond the hashed ones */
#define MAX_POSITIONS 32  /* occurrences of a context that vote */
#define MAX_CHAIN 96      /* occurrences looked at, those of other contexts included */
/* The chance that a token is accepted is read from a table by what speaks for it: see cell_of. */
#define SHARES 7
#define MATCHES 6
#define VOTES 4
#define CELLS (SHARES * MATCHES * VOTES)
#define MIN_CONTEXT 2     /* tokens; shorter contexts vote only where no longer one occurred */
#define OWN_WEIGHT 16     /* of a position in the row's own response */
#define START_TOKEN (-1)
#define NONE 0u

typedef struct {
    uint32_t hash;
    uint32_t head; /* newest node, NONE: empty */
} Entry;

typedef struct {
    Entry *entries;
    uint32_t mask, used;
} Table;

typedef struct {
    int32_t token;
    uint32_t next, prev;
    uint32_t start;         /* first node of its response */
    uint32_t older[ORDERS]; /* the occurrence before this one of the same context */
} Node;

typedef struct {
    PyObject_HEAD
    Node *nodes;
    uint32_t count, capacity; /* node 0 is NONE */
    uint32_t *tails;          /* last node of each response */
    uint32_t responses, responses_capacity;
    Table tables[ORDERS];
} SuffixIndex;

/* Hash of the `order` tokens that end at `node`; 0 where there are fewer. */
static uint32_t context_hash(const SuffixIndex *self, uint32_t node, int order)
{
    uint64_t h = 0x9e3779b97f4a7c15u ^ (uint64_t)order;
    for (int i = 0; i < order; i++) {
        if (node == NONE)
            return 0;
        h = (h ^ (uint32_t)self->nodes[node].token) * 0xd6e8feb86659fd93u;
        h ^= h >> 32;
        node = self->nodes[node].prev;
    }
    return (uint32_t)h | 1u;
}

static Entry *table_find(const Table *table, uint32_t hash)
{
    uint32_t i = hash & table->mask;
    while (table->entries[i].head != NONE && table->entries[i].hash != hash)
        i = (i + 1) & table->mask;
    return &table->entries[i];
}

static int table_grow(Table *table)
{
    Table bigger = {NULL, table->mask * 2 + 1, table->used};
    bigger.entries = calloc((size_t)bigger.mask + 1, sizeof(Entry));
    if (bigger.entries == NULL)
        return -1;
    for (uint32_t i = 0; i <= table->mask; i++)
        if (table->entries[i].head != NONE)
            *table_find(&bigger, table->entries[i].hash) = table->entries[i];
    free(table->entries);
    *table = bigger;
    return 0;
}

/* Append a token behind `prev`; its node, or NONE where memory is short. */
static uint32_t append(SuffixIndex *self, uint32_t prev, int32_t token)
{
    if (self->count == self->capacity) {
        if (self->capacity > UINT32_MAX / 2)
            return NONE;
        uint32_t capacity = self->capacity + self->capacity / 2;
        Node *nodes = realloc(self->nodes, (size_t)capacity * sizeof(Node));
        if (nodes == NULL)
            return NONE;
        self->nodes = nodes;
        self->capacity = capacity;
    }
    for (int o = 0; o < ORDERS; o++) {
        Table *table = &self->tables[o];
        if ((uint64_t)table->used * 5 >= (uint64_t)table->mask * 4 && table_grow(table) < 0)
            return NONE;
    }
    uint32_t id = self->count++;
    Node *node = &self->nodes[id];
    node->token = token;
    node->next = NONE;
    node->prev = prev;
    node->start = prev == NONE ? id : self->nodes[prev].start;
    for (int o = 0; o < ORDERS; o++) {
        node->older[o] = NONE;
        uint32_t hash = context_hash(self, id, ORDER[o]);
        if (hash == 0)
            continue;
        Entry *entry = table_find(&self->tables[o], hash);
        self->tables[o].used += entry->head == NONE;
        entry->hash = hash;
        node->older[o] = entry->head;
        entry->head = id;
    }
    if (prev != NONE)
        self->nodes[prev].next = id;
    return id;
}

/* How many tokens before and at `a` and `b` are the same, at most `most`. */
static int match_length(const SuffixIndex *self, uint32_t a, uint32_t b, int most)
{
    int n = 0;
    while (n < most && a != NONE && b != NONE && self->nodes[a].token == self->nodes[b].token) {
        a = self->nodes[a].prev;
        b = self->nodes[b].prev;
        n++;
    }
    return n;
}

typedef struct {
    uint32_t node; /* the next token of this position is voted for */
    float weight;
    int match; /* tokens before it that are the row's last ones */
} Voter;

/* The positions that the contexts of `tail` lead to, those of the longest first. */
static int find_voters(const SuffixIndex *self, uint32_t tail, Voter *voters)
{
    int found = 0;
    int known = MAX_MATCH + 1; /* positions that match this far have been found with longer contexts */
    for (int o = ORDERS - 1; o >= 0 && (!found || ORDER[o] >= MIN_CONTEXT); o--) {
        uint32_t hash = context_hash(self, tail, ORDER[o]);
        if (hash == 0)
            continue;
        uint32_t at = table_find(&self->tables[o], hash)->head;
        for (int looked = 0; at != NONE && looked < MAX_CHAIN && found < MAX_POSITIONS; looked++) {
            if (self->nodes[at].next != NONE) {
                int n = match_length(self, at, tail, MAX_MATCH);
                if (n >= ORDER[o] && n < known) {
                    int own = self->nodes[at].start == self->nodes[tail].start;
                    voters[found].node = at;
                    voters[found].weight = (float)(n * n * n) * (own ? OWN_WEIGHT : 1);
                    voters[found].match = n;
                    found++;
                }
            }
            at = self->nodes[at].older[o];
        }
        known = ORDER[o];
    }
    return found;
}

/* Cell of a token that `share` of the weights and `votes` positions are for, of which the longest
 * match is `match` tokens. */
static int cell_of(float share, int match, int votes)
{
    static const float SHARE[SHARES - 1] = {0.3f, 0.5f, 0.7f, 0.85f, 0.95f, 0.995f};
    int s = 0, m = 0, v = 0;
    while (s < SHARES - 1 && share >= SHARE[s])
        s++;
    while (m < MATCHES - 1 && match >= 2 << m) /* 1, 2.., 4.., 8.., 16.., 32.. */
        m++;
    while (v < VOTES - 1 && votes >= 2 << v) /* 1, 2.., 4.., 8.. */
        v++;
    return (s * MATCHES + m) * VOTES + v;
}

/* Tokens that the voters follow on together, the likeliest at each step; their number. */
static int follow(const SuffixIndex *self, Voter *voters, int count, int most, double least,
                  const float *chances, int32_t *tokens, unsigned char *cells,
                  float *probabilities)
{
    int n = 0;
    double path = 1.0;
    while (n < most && count > 0) {
        int32_t seen[MAX_POSITIONS];
        float weights[MAX_POSITIONS];
        int votes[MAX_POSITIONS];
        int kinds = 0;
        float total = 0.0f;
        for (int i = 0; i < count; i++) {
            int32_t token = self->nodes[self->nodes[voters[i].node].next].token;
            int k = 0;
            while (k < kinds && seen[k] != token)
                k++;
            if (k == kinds) {
                seen[kinds] = token;
                weights[kinds] = 0.0f;
                votes[kinds++] = 0;
            }
            weights[k] += voters[i].weight;
            votes[k]++;
            total += voters[i].weight;
        }
        int best = 0;
        for (int k = 1; k < kinds; k++)
            if (weights[k] > weights[best])
                best = k;
        int kept = 0, longest = 0;
        for (int i = 0; i < count; i++) {
            uint32_t next = self->nodes[voters[i].node].next;
            if (self->nodes[next].token != seen[best])
                continue;
            if (voters[i].match > longest)
                longest = voters[i].match;
            if (self->nodes[next].next != NONE) {
                voters[kept] = voters[i];
                voters[kept++].node = next;
            }
        }
        int cell = cell_of(weights[best] / total, longest + n, votes[best]);
        path *= chances[cell];
        if (path < least)
            break;
        tokens[n] = seen[best];
        cells[n] = (unsigned char)cell;
        probabilities[n] = (float)path;
        n++;
        count = kept;
    }
    return n;
}

static int response_of(const SuffixIndex *self, unsigned long number)
{
    if (number < self->responses)
        return 0;
    PyErr_Format(PyExc_IndexError, "response %lu of %lu", number, (unsigned long)self->responses);
    return -1;
}

static PyObject *index_start(PyObject *object, PyObject *unused)
{
    SuffixIndex *self = (SuffixIndex *)object;
    (void)unused;
    if (self->responses == self->responses_capacity) {
        uint32_t capacity = self->responses_capacity * 2;
        uint32_t *tails = realloc(self->tails, (size_t)capacity * sizeof(uint32_t));
        if (tails == NULL)
            return PyErr_NoMemory();
        self->tails = tails;
        self->responses_capacity = capacity;
    }
    uint32_t node = append(self, NONE, START_TOKEN);
    if (node == NONE)
        return PyErr_NoMemory();
    self->tails[self->responses] = node;
    return PyLong_FromUnsignedLong(self->responses++);
}

static PyObject *index_extend(PyObject *object, PyObject *args)
{
    SuffixIndex *self = (SuffixIndex *)object;
    unsigned long number;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "ky*", &number, &buffer))
        return NULL;
    PyObject *result = NULL;
    if (response_of(self, number) < 0)
        goto done;
    if (buffer.len % (Py_ssize_t)sizeof(int32_t)) {
        PyErr_SetString(PyExc_ValueError, "tokens must be int32");
        goto done;
    }
    const char *bytes = buffer.buf;
    for (Py_ssize_t i = 0; i < buffer.len; i += sizeof(int32_t)) {
        int32_t token;
        memcpy(&token, bytes + i, sizeof token);
        uint32_t node = append(self, self->tails[number], token);
        if (node == NONE) {
            PyErr_NoMemory();
            goto done;
        }
        self->tails[number] = node;
    }
    result = Py_None;
    Py_INCREF(result);
done:
    PyBuffer_Release(&buffer);
    return result;
}

static PyObject *index_draft(PyObject *object, PyObject *args)
{
    SuffixIndex *self = (SuffixIndex *)object;
    unsigned long number;
    int most;
    double least;
    Py_buffer chances;
    if (!PyArg_ParseTuple(args, "kidy*", &number, &most, &least, &chances))
        return NULL;
    PyObject *result = NULL;
    int32_t *tokens = NULL;
    unsigned char *cells = NULL;
    float *probabilities = NULL;
    if (response_of(self, number) < 0)
        goto done;
    if (most < 0 || most > 4096) {
        PyErr_Format(PyExc_ValueError, "max_tokens must be in 0..4096, got %d", most);
        goto done;
    }
    if (chances.len != (Py_ssize_t)(CELLS * sizeof(float))) {
        PyErr_Format(PyExc_ValueError, "chances must be float32 [%d]", CELLS);
        goto done;
    }
    tokens = malloc((size_t)(most + 1) * sizeof(int32_t));
    cells = malloc((size_t)(most + 1));
    probabilities = malloc((size_t)(most + 1) * sizeof(float));
    if (tokens == NULL || cells == NULL || probabilities == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Voter voters[MAX_POSITIONS];
    int count = find_voters(self, self->tails[number], voters);
    int n = follow(self, voters, count, most, least, chances.buf, tokens, cells, probabilities);
    result = Py_BuildValue("(y#y#y#)", (char *)tokens, (Py_ssize_t)(n * sizeof(int32_t)),
                           (char *)cells, (Py_ssize_t)n, (char *)probabilities,
                           (Py_ssize_t)(n * sizeof(float)));
done:
    free(tokens);
    free(cells);
    free(probabilities);
    PyBuffer_Release(&chances);
    return result;
}

static PyObject *index_tokens(PyObject *object, void *unused)
{
    SuffixIndex *self = (SuffixIndex *)object;
    (void)unused;
    return PyLong_FromUnsignedLong(self->count - 1 - self->responses);
}

static PyObject *index_nbytes(PyObject *object, void *unused)
{
    SuffixIndex *self = (SuffixIndex *)object;
    (void)unused;
    size_t bytes = sizeof(SuffixIndex) + (size_t)self->capacity * sizeof(Node);
    bytes += (size_t)self->responses_capacity * sizeof(uint32_t);
    for (int o = 0; o < ORDERS; o++)
        bytes += ((size_t)self->tables[o].mask + 1) * sizeof(Entry);
    return PyLong_FromSize_t(bytes);
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    SuffixIndex *self = (SuffixIndex *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->capacity = 64;
    self->count = 1;
    self->responses_capacity = 8;
    self->nodes = malloc(self->capacity * sizeof(Node));
    self->tails = malloc(self->responses_capacity * sizeof(uint32_t));
    int short_of = self->nodes == NULL || self->tails == NULL;
    for (int o = 0; o < ORDERS; o++) {
        self->tables[o].mask = 63;
        self->tables[o].entries = calloc(64, sizeof(Entry));
        short_of |= self->tables[o].entries == NULL;
    }
    if (short_of) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void index_dealloc(PyObject *object)
{
    SuffixIndex *self = (SuffixIndex *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->nodes);
    free(self->tails);
    for (int o = 0; o < ORDERS; o++)
        free(self->tables[o].entries);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF((PyObject *)type);
}

static PyMethodDef index_methods[] = {
    {"start", index_start, METH_NOARGS, "Begin a response; its number."},
    {"extend", index_extend, METH_VARARGS, "extend(response, tokens): append int32 tokens."},
    {"draft", index_draft, METH_VARARGS,
     "draft(response, max_tokens, least, chances): (tokens, cells, probabilities)."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef index_getset[] = {
    {"tokens", index_tokens, NULL, "Tokens indexed.", NULL},
    {"nbytes", index_nbytes, NULL, "Memory taken, bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot index_slots[] = {
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_methods, index_methods},
    {Py_tp_getset, index_getset},
    {Py_tp_doc, "Earlier responses to a prompt, found by context; see the top of the file."},
    {0, NULL},
};

static PyType_Spec index_spec = {
    "nemo_specrl.drafting._suffix.SuffixIndex",
    sizeof(SuffixIndex),
    0,
    Py_TPFLAGS_DEFAULT,
    index_slots,
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&index_spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "SuffixIndex", type);
    if (!failed)
        failed = PyModule_AddIntMacro(module, SHARES) | PyModule_AddIntMacro(module, MATCHES) |
                 PyModule_AddIntMacro(module, VOTES);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_suffix", NULL, 0, NULL, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__suffix(void) { return PyModuleDef_Init(&module_def); }
