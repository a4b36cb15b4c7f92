"""Tiny random Llama and Qwen3 checkpoints whose greedy output is varied and depends on far context.

A random transformer with default initialisation maps the current token to the next one and loops at once; sparse
attention would then never be wrong and no draft ever rejected. Here queries and keys are sharp and the attention
output is as large as the embedding, so that each next token depends on a few distant positions
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
    "qwen3-gqa3": TinySpec(architecture="qwen3", num_heads=6, num_kv_heads=2, head_dim=32, hidden_size=96),
    "qwen3-gqa4": TinySpec(architecture="qwen3", num_heads=8, num_kv_heads=2),
}


def build_tiny_model(name: str, root: Path) -> Path:
    """Write ``TINY_MODELS[name]`` (float32) to ``root/name`` unless it is there; returns that folder."""
    target = root / name
    if (target / "config.json").exists():
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
    gains = {"q_proj": 1.7, "k_proj": 1.7, "v_proj": 1.5, "o_proj": 1.5, "lm_head": 3.0}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            role = name.split(".")[-2]
            if role in ("q_norm", "k_norm"):
                parameter.fill_(gains["q_proj"])
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                std = 1.0 if role == "embed_tokens" else gains.get(role, 1.0) / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


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
