"""Keys of prompts that hold more than text: images, sounds, videos.

Two prompts with the same text but different images are two prompts. Their key therefore covers the
content of what is not text, and is equal in every process. Imports neither torch, PIL nor vLLM:
their objects are recognized by their attributes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

__all__ = ["content_tokens", "has_media", "media_prompt_key"]

_KEY_SEED = 0x4D454449  # "MEDI": keeps the keys apart from those of text only
_CONTENT = "prompt_token_ids", "prompt", "multi_modal_data", "mm_processor_kwargs", "mm_hashes"
"""The fields that decide the meaning of a prompt, as vLLM takes it or as it has rendered it."""


def has_media(prompt: Any) -> bool:
    """Whether a prompt, as vLLM takes it or has rendered it, has images, sounds or videos."""
    return isinstance(prompt, Mapping) and any(
        prompt.get(name) for name in ("multi_modal_data", "mm_hashes")
    )


def media_prompt_key(prompt: Mapping[str, Any]) -> bytes:
    """Return the 16-byte key of a prompt with media.

    It is the xxh3-128 hash of its tokens or text, and of the content of its media: the pixels of an
    image, the numbers of an array.

    Args:
        prompt: as vLLM takes it: ``prompt_token_ids`` or ``prompt``, and ``multi_modal_data``; or
            as vLLM has rendered it, with its own ``mm_hashes``.
    """
    hasher = xxhash.xxh3_128(seed=_KEY_SEED)
    for name in _CONTENT:
        if name in prompt:
            _feed(hasher, name)
            _feed(hasher, prompt[name])
    return hasher.digest()


def content_tokens(
    token_ids: Sequence[int], media: Iterable[tuple[str, int, int]]
) -> Sequence[int]:
    """Return a prompt's tokens, with placeholders of media replaced by numbers for their content.

    Prompts with the same text and different images have the same tokens. The returned ones differ,
    and the beginning of a prompt still corresponds to the beginning of its tokens.

    Args:
        token_ids: tokens with placeholders.
        media: content name, first position and number of placeholders of each.

    Returns:
        The same number of integers, each in ``0 .. 2**31 - 1``.
    """
    tokens: list[int] | None = None
    for name, start, length in media:
        tokens = list(token_ids) if tokens is None else tokens
        digest = xxhash.xxh3_128_digest(name.encode(), seed=_KEY_SEED)
        numbers = np.resize(np.frombuffer(digest, "<u4") >> 1, length)
        tokens[start : start + length] = numbers.tolist()
    return token_ids if tokens is None else tokens


def _feed(hasher: Any, value: Any) -> None:
    """Hash a value of any kind, with its kind and size, so that no two values read the same."""
    if isinstance(value, str):
        _piece(hasher, "str", value.encode())
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _piece(hasher, "bytes", bytes(value))
    elif isinstance(value, Mapping):
        _piece(hasher, f"mapping {len(value)}", b"")
        for name in sorted(value, key=str):
            _feed(hasher, str(name))
            _feed(hasher, value[name])
    elif isinstance(value, (list, tuple)):
        _piece(hasher, f"sequence {len(value)}", b"")
        for part in value:
            _feed(hasher, part)
    elif hasattr(value, "mode") and hasattr(value, "getpalette"):  # an image of PIL
        palette = value.getpalette() if value.mode == "P" else None
        _piece(hasher, f"image {value.mode} {value.size}", value.tobytes())
        _feed(hasher, palette)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        _piece(hasher, f"array {value.dtype.str} {value.shape}", value.tobytes())
    elif hasattr(value, "detach"):  # a tensor of torch; numpy has no bfloat16
        values = value.detach().cpu()
        known = values.float() if values.is_floating_point() else values
        _piece(hasher, f"tensor {value.dtype}", b"")
        _feed(hasher, known.numpy())
    else:
        # Objects may be serialized differently in another process, which costs their drafts.
        _piece(hasher, type(value).__name__, pickle.dumps(value, protocol=4))


def _piece(hasher: Any, kind: str, data: bytes) -> None:
    hasher.update(f"{kind} {len(data)}:".encode())
    hasher.update(data)
