"""Keys of prompts with images, sounds and videos: of their content, the same in every process."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_specrl import prompt_key
from nemo_specrl.drafting.roots import Roots
from nemo_specrl.media import content_tokens, has_media, media_prompt_key

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def photo(pixels=PIXELS):
    return Image.fromarray(pixels)


def prompt(media, text="<image>what?", kind="image", **more):
    return {"prompt": text, "multi_modal_data": {kind: media}, **more}


OTHERS = [
    prompt(photo()),
    prompt(photo(PIXELS + 1)),
    prompt(photo(PIXELS.reshape(2, 8, 3))),  # the same bytes
    prompt(photo().convert("L")),
    prompt(photo().convert("P")),
    prompt([photo(), photo()]),
    prompt([photo(), photo(PIXELS + 1)]),
    prompt(photo(), text="<image>who?"),
    prompt(photo(), text="", mm_processor_kwargs={"size": 1}),
    {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": photo()}},
    {"prompt_token_ids": [12], "multi_modal_data": {"image": photo()}},
    prompt(PIXELS, kind="video"),
    prompt(PIXELS.astype(np.int16), kind="video"),
    prompt((PIXELS, {"fps": 1.0}), kind="video"),
    prompt((PIXELS, {"fps": 2.0}), kind="video"),
    prompt(torch.ones(3), kind="audio"),
    prompt(torch.ones(3, dtype=torch.bfloat16), kind="audio"),
    prompt((np.ones(3, np.float32), 16000), kind="audio"),
    prompt((np.ones(3, np.float32), 8000), kind="audio"),
    prompt([b"ab", b"c"], kind="audio"),
    prompt([b"a", b"bc"], kind="audio"),
    {"prompt_token_ids": [1, 2], "mm_hashes": {"image": ["a"]}, "mm_kwargs": {}},
    {"prompt_token_ids": [1, 2], "mm_hashes": {"image": ["b"]}, "mm_kwargs": {}},
]


def test_other_content_has_another_key():
    keys = [media_prompt_key(other) for other in OTHERS]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {16}
    assert [media_prompt_key(copy.deepcopy(other)) for other in OTHERS] == keys
    assert prompt_key([1, 2]) not in keys
    salted = {**OTHERS[0], "cache_salt": "7", "multi_modal_uuids": {}}  # says nothing of content
    assert media_prompt_key(salted) == keys[0]


def test_equal_in_another_process():
    program = (
        "import numpy, PIL.Image, nemo_specrl.media as m;"
        "p = numpy.arange(48, dtype=numpy.uint8).reshape(4, 4, 3);"
        "d = {'image': PIL.Image.fromarray(p), 'audio': (p.astype('f4'), 16000)};"
        "print(m.media_prompt_key({'prompt': 'x', 'multi_modal_data': d}).hex())"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    media = {"audio": (PIXELS.astype("f4"), 16000), "image": photo()}
    assert told.stdout.strip() == media_prompt_key({"prompt": "x", "multi_modal_data": media}).hex()


@pytest.mark.parametrize(
    ("given", "media"),
    [
        (prompt(photo()), True),
        (OTHERS[-1], True),
        ({"prompt_token_ids": [1]}, False),
        (prompt(None), True),
        ({"prompt": "a", "multi_modal_data": {}}, False),
        ("a", False),
        ([1], False),
    ],
)
def test_what_has_media(given, media):
    assert has_media(given) is media


def test_roots_tell_images_apart():
    tokens = [1, 5, 7, 7, 7, 7, 6, 9]
    assert content_tokens(tokens, []) is tokens
    cat, dog = (content_tokens(tokens, [(name, 2, 4)]) for name in ("cat", "dog"))
    assert cat[:2] == dog[:2] == tokens[:2] and cat[6:] == dog[6:] == tokens[6:]
    assert not set(cat[2:6]) & set(dog[2:6]) and all(0 <= token < 2**31 for token in cat + dog)
    roots = Roots(8)
    assert roots.key_of(cat, b"cat") == b"cat" and roots.key_of(dog, b"dog") == b"dog"
    later = content_tokens([*tokens, 3, 3], [("dog", 2, 4)])
    assert roots.find(later, None) == (b"dog", len(tokens))
