"""Tiny random Llama and Qwen3 checkpoints whose greedy output is varied and depends on far context.

A random transformer with default initialisation maps the current token to the next one and loops at once: sparse
attention would never be wrong and no draft ever rejected. With sharp random attention every far token matters and no
draft is ever right. These weights lie between: residual dimension 0 holds a constant that queries and keys turn into
rotary scores that fall with distance, so that near tokens weigh most and far ones sometimes decide
(measured by tests/unit/test_tiny_models.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

VOCAB_SIZE = 320
MAX_POSITIONS = 2048
# Found by trial: 10-40 % of greedy tokens change when only 3 of 38 pages are read, and tokens hardly repeat.
_GAINS = {"q_proj": 0.8, "k_proj": 0.8, "o_proj": 0.5, "lm_head": 3.0}
_QK_NORM = 2.0
_LOCALITY = 3.0
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinySpec:
    """Shape of one tiny model; the weights follow from it and the seed alone."""

    architecture: str
    num_heads: int
    num_kv_heads: int
    head_dim: int = 16
    hidden_size: int = 64
    num_layers: int = 4
    seed: int = 0


TINY_MODELS = {
    "llama-gqa1": TinySpec(architecture="llama", num_heads=4, num_kv_heads=4),
    "llama-gqa3": TinySpec(architecture="llama", num_heads=6, num_kv_heads=2, hidden_size=96),
    "llama-gqa4": TinySpec(architecture="llama", num_heads=8, num_kv_heads=2),
    "qwen3-gqa1": TinySpec(architecture="qwen3", num_heads=4, num_kv_heads=4),
    "qwen3-gqa3": TinySpec(architecture="qwen3", num_heads=6, num_kv_heads=2, hidden_size=96),
    "qwen3-gqa4": TinySpec(architecture="qwen3", num_heads=8, num_kv_heads=2),
}


def build_tiny_model(name: str, root: Path) -> Path:
    """Write ``TINY_MODELS[name]`` (float32) to ``root/name`` unless it is there; returns that folder."""
    target = root / name
    if (target / "model.safetensors").exists():  # written last
        return target
    spec = TINY_MODELS[name]
    model = AutoModelForCausalLM.from_config(_config(spec), dtype=torch.float32)
    _fill_weights(model, seed=spec.seed)
    _tokenizer().save_pretrained(target)
    model.save_pretrained(target)
    return target


def _config(spec: TinySpec) -> LlamaConfig | Qwen3Config:
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[spec.architecture]
    return config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=spec.hidden_size,
        intermediate_size=2 * spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=_SPECIAL_TOKENS.index("<|im_start|>") + VOCAB_SIZE - len(_SPECIAL_TOKENS),
        eos_token_id=_SPECIAL_TOKENS.index("<|im_end|>") + VOCAB_SIZE - len(_SPECIAL_TOKENS),
        pad_token_id=_SPECIAL_TOKENS.index("<|pad|>") + VOCAB_SIZE - len(_SPECIAL_TOKENS),
    )


def _fill_weights(model: torch.nn.Module, *, seed: int) -> None:
    """Normal weights with fan-in scaling times a gain for each role (see the module's docstring)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            role = name.split(".")[-2]
            if weight.ndim == 1:
                weight.fill_(_QK_NORM if role in ("q_norm", "k_norm") else 1.0)
                continue
            std = _GAINS.get(role, 1.0) / (1.0 if role == "embed_tokens" else weight.shape[1] ** 0.5)
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            if role == "embed_tokens":
                weight[:, 0] = _LOCALITY
            elif role in ("q_proj", "k_proj"):
                weight[:, 0] = 1.0
            elif role in ("o_proj", "down_proj"):
                weight[0] = 0.0


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly ``VOCAB_SIZE`` tokens: every id decodes, every text encodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(_letter_pairs(VOCAB_SIZE - len(alphabet) - len(_SPECIAL_TOKENS)))
    tokens = [*alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=_CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _letter_pairs(count: int) -> Iterator[tuple[str, str]]:
    for (left, right), _ in zip(product("etaoinsh", "etaoinsr"), range(count), strict=False):
        yield left, right
