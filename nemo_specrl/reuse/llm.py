"""PrefixReuse: ``vllm.LLM.generate`` with the accepted prefixes of earlier responses."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.errors import ConfigError
from nemo_specrl.reuse.base import Place, ReuseBase, request_output
from nemo_specrl.reuse.metrics import ReuseMetrics
from nemo_specrl.reuse.row import EngineRequest, Row

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from nemo_specrl.cache import HistoryCache

__all__ = ["PrefixReuse"]

Running = tuple[Row, Generator[EngineRequest, Any, None]]


class PrefixReuse(ReuseBase):
    """A drop-in for ``vllm.LLM.generate`` that reuses earlier responses (SPEC-RL).

    For example::

        config = SpecRLConfig(preset="reuse", cache={"dir": "/raid/specrl"})
        reuse = PrefixReuse(llm, config, open_cache(config.cache, vocabulary))
        outputs = reuse.generate(prompts, SamplingParams(temperature=1.0, max_tokens=4096))
        ...  # train, and load the new weights into the engine
        reuse.policy_version = 1

    Each completion's ``spec_rl`` (:class:`~nemo_specrl.reuse.row.Reuse`) says how much of it was
    reused. It is not an exact sample of the policy: docs/guide/reuse.md says what that costs.

    Args:
        llm: a running ``vllm.LLM``.
        config: the ``spec_rl:`` block, with ``preset: reuse``.
        cache: where drafts come from and responses go; None: nothing is reused.
        seed: seed of the acceptance test; another one for each engine of a run.
        policy_version: version of the weights that the engine holds now, a non-negative int.

    Attributes:
        metrics: :class:`~nemo_specrl.reuse.metrics.ReuseMetrics` of the last call.

    Raises:
        ConfigError: the preset is another one, or prefix reuse would be wrong on this engine, or
            slower than none.
    """

    def __init__(
        self,
        llm: LLM,
        config: SpecRLConfig,
        cache: HistoryCache | None,
        seed: int = 0,
        policy_version: int = 0,
    ) -> None:
        self.llm = llm
        super().__init__(llm.llm_engine, config, cache, seed, policy_version)

    @property
    def policy_version(self) -> int:
        """Version of the weights in the engine, which the caller raises after every refit.

        Setting it drops the engine's prefix cache, whose blocks are those of the old weights.

        Raises:
            ConfigError: requests are running, or it is no version; it has not changed.
        """
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if not self.llm.reset_prefix_cache():
            raise ConfigError(
                f"policy_version = {version}: requests are still running, whose prefixes are those "
                "of the old weights; let them end before the weights change"
            )
        self._begin(version)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Generate responses to prompts; takes and returns what ``vllm.LLM.generate`` does.

        Args:
            prompts: token ids or text. Greedy requests, those for prompt log-probs, those with
                images and those with ``extra_args={"spec_rl": False}`` are vLLM's alone.
            sampling_params: one for all, or one for each prompt; None: the engine's defaults.
            use_tqdm: whether to show a progress bar.
            lora_request: as in vLLM; one for all prompts of a policy version.

        Raises:
            UnsupportedSampling: a draft could not be verified under these parameters.
            ConfigError: the prompts, or their number, are not right. No row has begun.
        """
        single = isinstance(prompts, (str, dict)) or (len(prompts) and isinstance(prompts[0], int))
        prompts = [prompts] if single else list(prompts)
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ConfigError(
                f"sampling_params: {len(sampling_params)} of them for {len(prompts)} prompts"
            )
        self.metrics = ReuseMetrics()
        asked = [
            self._places(prompt, params, f"prompts[{i}]: ")
            for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]
        places = [place for group in asked for place in group or ()]
        drafts = self._take_drafts(places)
        rows = [self._row(*pair) for pair in zip(places, drafts, strict=True)]
        plain = [
            (prompt, params)
            for prompt, params, group in zip(prompts, sampling_params, asked, strict=True)
            if group is None
        ]
        others = self._run(_in_order(places, rows), plain, use_tqdm, lora_request)
        self.flush()
        outputs, left = [], iter(rows)
        for group in asked:
            if group is None:
                outputs.append(next(others))
            else:
                name = str(next(self.llm.request_counter))
                outputs.append(request_output(group[0], [next(left) for _ in group], name))
        return outputs

    def _run(
        self,
        rows: Sequence[Row],
        plain: Sequence[tuple[Any, SamplingParams]],
        use_tqdm: bool,
        lora_request: Any,
    ) -> Any:
        """Take all rows of a call through the engine.

        Args:
            rows: in the order in which they begin.
            plain: prompts and parameters of the requests that are vLLM's alone.
            use_tqdm: whether to show a progress bar.
            lora_request: as in vLLM.

        Returns:
            An iterator over the outputs of ``plain``, in order.
        """
        from tqdm import tqdm
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        waiting = deque((row, row.run()) for row in rows)
        running: dict[str, Running] = {}
        others: dict[str, RequestOutput | None] = {}
        window = self.window or len(rows)

        def add(prompt: Any, params: SamplingParams) -> str:
            name = str(next(self.llm.request_counter))
            engine.add_request(name, prompt, params, lora_request=lora_request)
            return name

        def go_on(item: Running, output: RequestOutput | None) -> None:
            row, steps = item
            try:
                request = steps.send(output)
            except StopIteration:
                self._end(row)
                progress.update()
                return
            running[add(request.prompt, request.params)] = item

        progress = tqdm(total=len(rows) + len(plain), disable=not use_tqdm, desc="Responses")
        try:
            for prompt, params in plain:
                params = params.clone()
                params.output_kind = RequestOutputKind.FINAL_ONLY
                others[add(prompt, params)] = None
            while True:
                while waiting and len(running) < window:
                    go_on(waiting.popleft(), None)
                if not engine.has_unfinished_requests():
                    break
                # What an output asks for next enters the engine before the next row does.
                for output in engine.step():
                    if not output.finished:
                        continue
                    if output.request_id in others:
                        others[output.request_id] = output
                        progress.update()
                    elif output.request_id in running:
                        go_on(running.pop(output.request_id), output)
        finally:
            progress.close()
            left = [*running, *(name for name, output in others.items() if output is None)]
            if left:
                engine.abort_request(left)
        return iter(others.values())


def _in_order(places: Sequence[Place], rows: Sequence[Row]) -> list[Row]:
    """Order rows: the longest first, so that few are left at the end, and those of a prompt beside
    each other, so that they find it in the prefix cache. A row without a draft may be the longest.
    """
    longest: dict[bytes, float] = {}
    for place, row in zip(places, rows, strict=True):
        length = row.drafted or float("inf")
        longest[place.key] = max(longest.get(place.key, 0), length)
    rank = {key: i for i, key in enumerate(longest)}
    pairs = sorted(
        zip(places, rows, strict=True), key=lambda pair: (-longest[pair[0].key], rank[pair[0].key])
    )
    return [row for _, row in pairs]
