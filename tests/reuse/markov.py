"""A stand-in for an engine, so that rows can be tested without one: a Markov chain in numpy.

It answers requests in vLLM's form: prompt log-probs behind a simulated prefix cache, uninitialised
memory (V1) or nothing (V2) in front of that, and decoding to a stop token, a stop string, the
budget or an abort.
"""

import bisect
import itertools

import numpy as np
from transformers import AutoTokenizer
from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import FlatLogprobs

from nemo_specrl.reuse.limits import EngineLimits
from nemo_specrl.reuse.row import Row
from nemo_specrl.reuse.sampling import StopRules
from nemo_specrl.rollout import prompt_key
from tests.conftest import SHIPPED_MODEL
from tests.reuse.support import block, sampling
from tests.support.engines import EOS, PROMPT, VOCABULARY

TOKENIZER = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
BLOCK = 16


def limits(**options):
    usual = {
        "max_model_len": 8192,
        "vocabulary": VOCABULARY,
        "eos": EOS,
        "extra_eos": frozenset(),
        "tokenizer": TOKENIZER,
        "block_size": BLOCK,
        "kv_tokens": 1 << 20,
        "dtype_bytes": 4,
    }
    return EngineLimits(**usual | options)


def flat(tokens, values):
    n = len(tokens)
    return FlatLogprobs(
        list(range(n)), list(range(1, n + 1)), list(tokens), list(values), [1] * n, [None] * n
    )


class MarkovEngine:
    """Answers the requests of rows.

    Args:
        log_p: log-probs of the next token by the last one, float ``[v, v]``.
        v2: whether log-probs come as from vLLM's V2 runner.
        seed: of its decoding.
    """

    def __init__(self, log_p, *, v2=False, seed=0):
        self.log_p, self.v2 = np.asarray(log_p), v2
        self.cumulative = np.exp(self.log_p).cumsum(axis=1).tolist()
        self.rng = np.random.default_rng(seed)
        self.blocks = set()
        self.requests = []
        self.limits = limits()
        self.spoil = None  # changes an output before a row sees it

    def answer(self, request):
        self.requests.append(request)
        tokens, params = request.tokens, request.params
        names = self._blocks(tokens)
        cached = 0
        if not params.skip_reading_prefix_cache:
            most = (len(tokens) - 1) // BLOCK  # the last token is always computed
            found = itertools.takewhile(self.blocks.__contains__, names[:most])
            cached = BLOCK * len(list(found))
        self.blocks.update(names)
        if params.prompt_logprobs is not None:
            scores = self._scores(tokens, cached)
            output = self._output(tokens, [0], [-1.0], "length", None, scores, cached)
        else:
            output = self._output(tokens, *self._decode(tokens, params), None, cached)
        if self.spoil is not None:
            self.spoil(request, output)
        return output

    def run(self, row, *, abort_before=None):
        """Take a row to its end; the requests from number ``abort_before`` on are not made."""
        steps, output = row.run(), None
        for number in range(100):
            try:
                request = steps.send(output)
            except StopIteration:
                return row
            output = self.answer(request) if abort_before is None or number < abort_before else None
        raise AssertionError("a row that does not end")

    def _blocks(self, tokens):
        """Names of the whole blocks of tokens, each with all that is in front of it."""
        names, name = [], 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            name = hash((name, *tokens[start : start + BLOCK]))
            names.append(name)
        return names

    def _scores(self, tokens, cached):
        values = self.log_p[tokens[:-1], tokens[1:]]
        shown = values[cached:] if self.v2 else np.where(np.arange(len(values)) < cached, 0, values)
        scores = FlatLogprobs()
        scores.append(None)
        scores.extend(flat(tokens[len(tokens) - len(shown) :], shown))
        return scores

    def _decode(self, tokens, params):
        made, stops = [], {EOS, *(params.stop_token_ids or ())}
        if params.ignore_eos:
            stops.discard(EOS)
        reason, stop, last = "length", None, tokens[-1]
        room = min(params.max_tokens, self.limits.max_model_len - len(tokens))
        for u in self.rng.random(room).tolist():
            last = min(bisect.bisect_right(self.cumulative[last], u), VOCABULARY - 1)
            made.append(last)
            if last in stops:
                reason, stop = "stop", None if last == EOS else last
                break
        if params.stop:
            text = StopRules(params, tokens, self.limits).text(made, by_token=reason == "stop")
            if text.stop_string is not None:
                made, reason, stop = made[: text.length], "stop", text.stop_string
        pairs = zip([tokens[-1], *made], made, strict=False)
        return made, [float(self.log_p[pair]) for pair in pairs], reason, stop

    def _output(self, tokens, made, values, reason, stop, scores, cached):
        params = {"cumulative_logprob": sum(values), "logprobs": flat(made, values)}
        completion = CompletionOutput(0, "", made, finish_reason=reason, stop_reason=stop, **params)
        return RequestOutput(
            "0", None, tokens, scores, [completion], True, num_cached_tokens=cached
        )


def chain(seed=0, sharpness=1.5):
    """Log-probs of a Markov chain that rarely ends by itself."""
    logits = np.random.default_rng(seed).normal(0, sharpness, (VOCABULARY, VOCABULARY))
    logits[:, EOS] -= 4
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def moved(log_p, by, seed=1):
    """The chain after a training step that moved its logits."""
    logits = log_p + np.random.default_rng(seed).normal(0, by, log_p.shape)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def row(draft=None, *, prompt=PROMPT, params=None, number=0, noise=None, at=None, **options):
    return Row(
        list(prompt),
        params or sampling(),
        key=prompt_key(prompt),
        names=(0, 1, number),
        policy_version=1,
        limits=at or limits(),
        config=block(**options).reuse,
        draft=draft,
        noise=noise,
    )
