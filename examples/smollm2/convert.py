"""Write weights of llama.cpp's format as a folder in Hugging Face's layout, in float32.

Run with `-m`, the file and the folder: the memory that this takes ends with the process.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, folder: Path) -> None:
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # the weights are whole numbers of a scale no longer
    for owner, names in (
        (model.config, ("quantization_config", "_name_or_path")),
        (model, ("is_quantized", "hf_quantizer", "quantization_method")),
    ):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
