"""GGUF of a small Llama model -> a Hugging Face folder (config, safetensors, fast tokenizer) that SGLang loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def convert_gguf(source: Path, target: Path) -> None:
    """Write ``source`` into the empty folder ``target``, dequantised to bfloat16.

    bfloat16 is what the reference study stored: computing in float32 from these weights (``--dtype float32``) gives
    its greedy tokens and its logit margins to 1e-4; weights kept in float32 give other tokens at near ties.
    """
    reader = gguf.GGUFReader(source)
    rope_theta = float(_field(reader, "llama.rope.freq_base"))
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        model.to(torch.bfloat16).save_pretrained(target)
        _build_tokenizer(reader).save_pretrained(target)
    finally:
        logging.enable_progress_bar()
    # Where readers of the older config format look.
    _update_json(target / "config.json", {"rope_theta": rope_theta, "torch_dtype": "bfloat16"})
    _update_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _update_json(path: Path, values: dict[str, Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _build_tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    """The tokenizer in the file: byte-level BPE with single digits (``tokenizer.ggml.pre = smollm``).

    Built by hand because the GGUF reader of transformers ignores that field and would merge digits.
    """
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])

    def token_of(role: str) -> str:
        token_id: int = _field(reader, f"tokenizer.ggml.{role}_token_id")
        return tokens[token_id]

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token_of("bos"),
        eos_token=token_of("eos"),
        unk_token=token_of("unknown"),
        pad_token=token_of("padding"),
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()
