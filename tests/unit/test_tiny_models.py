"""The tiny models are useful only if their drafts are sometimes wrong and their output is not a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE, build_tiny_model

PAGE = 16
PROMPT_TOKENS = 600
NEW_TOKENS = 48


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", TINY_MODELS)
def test_output_is_varied_and_depends_on_far_pages(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Greedy decoding against the same step that reads the first and the last two pages only (3 of 38)."""
    model = load(tiny_model(name))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, VOCAB_SIZE - 4, (1, PROMPT_TOKENS), generator=generator)
    num_changed, tokens = 0, []
    with torch.inference_mode():
        out = model(prompt, use_cache=True)
        cache, token = out.past_key_values, int(out.logits[0, -1].argmax())
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS):
            kept = torch.zeros(1, position + 1, dtype=torch.long)
            kept[:, :PAGE] = 1
            kept[:, (position // PAGE - 1) * PAGE :] = 1
            step = {"input_ids": torch.tensor([[token]]), "position_ids": torch.tensor([[position]])}
            sparse = model(**step, past_key_values=copy.deepcopy(cache), attention_mask=kept).logits[0, -1]
            dense = model(**step, past_key_values=cache).logits[0, -1]
            token = int(dense.argmax())
            tokens.append(token)
            num_changed += token != int(sparse.argmax())
    assert len(set(tokens)) >= NEW_TOKENS // 3
    assert 0.05 <= num_changed / NEW_TOKENS <= 0.6


@pytest.mark.parametrize("name", ["llama-gqa3", "qwen3-gqa4"])
def test_weights_follow_from_the_name_alone(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    again = build_tiny_model(name, tmp_path)
    assert (again / "model.safetensors").read_bytes() == (tiny_model(name) / "model.safetensors").read_bytes()


def test_every_id_decodes_and_every_text_encodes(tiny_model: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model("llama-gqa1")))
    assert len(tokenizer) == VOCAB_SIZE
    assert all(tokenizer.convert_ids_to_tokens(i) is not None for i in range(VOCAB_SIZE))
    text = "the tenth line: 3 < 4, é, 漢"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
