"""What sampling is told: each request's parameters, its output so far, and what every logits row is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

GREEDY_TEMPERATURE = 1e-6
"""Temperatures below are greedy, as in SGLang."""
TOP_K_ALL = 1 << 30
"""SGLang's ``top_k`` for the whole vocabulary; -1 means the same."""
Processor = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""(logits float32 ``[1, V]``, its own copy; output ids before the token) -> logits ``[1, V]``."""


class TokenCounts:
    """How often each token occurs in a request's committed output. Drafts are never counted here."""

    def __init__(self, output_ids: Sequence[int] = ()) -> None:
        self.num_tokens = 0
        self._uncopied: list[int] = []
        self._by_token: dict[int, int] = {}
        self._dense: torch.Tensor | None = None
        self.catch_up(output_ids)

    def catch_up(self, output_ids: Sequence[int]) -> None:
        """Count the tokens of the whole output so far that are new since the last call, however many they are.

        Calling it again with the same output changes nothing. Raises ``ValueError`` if the output became shorter.
        """
        if len(output_ids) < self.num_tokens:
            raise ValueError(
                f"{self.num_tokens} output tokens were counted, but the output has {len(output_ids)}; "
                "start new TokenCounts for a request that was cut back"
            )
        new = output_ids[self.num_tokens :]
        for token in new:
            self._by_token[token] = self._by_token.get(token, 0) + 1
        self._uncopied.extend(new)
        self.num_tokens += len(new)

    def as_dict(self) -> dict[int, int]:
        """A copy: token id -> occurrences, present tokens only."""
        return dict(self._by_token)

    def dense(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """int32 ``[vocab_size]`` on ``device``, brought up to date in place at every call: read it, do not keep it.

        Made on first use, so only requests with penalties own one. Use from one stream. No host synchronisation.
        """
        if self._dense is None or self._dense.shape[0] != vocab_size or self._dense.device != device:
            self._dense = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            self._uncopied = [token for token, count in self._by_token.items() for _ in range(count)]
        if self._uncopied:
            index = host_to_device(self._uncopied, dtype=torch.int64, device=device)
            self._dense.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
            self._uncopied = []
        return self._dense


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSampling:
    """How one request's tokens are drawn. Names, ranges and meaning are SGLang's; ``ValueError`` on others.

    ``banned_until_min``  ids that ``min_new_tokens`` bans: stop_token_ids, the tokenizer's eos_token_id and its
                          additional_stop_token_ids (whether or not the request ignores EOS)
    ``processor``         custom logit processor, already bound to its parameters
    ``seed``              all 64 bits count; equal seeds give equal noise
    """

    temperature: float = 1.0
    top_k: int = TOP_K_ALL
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    banned_until_min: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    processor: Processor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "finite, 0 or more")
        _require(self.top_k == -1 or self.top_k >= 1, "top_k", self.top_k, "-1 (off) or at least 1")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0 (1 is off)")
        _require(self.min_new_tokens >= 0, "min_new_tokens", self.min_new_tokens, "0 or more")

    @property
    def is_greedy(self) -> bool:
        """Takes the argmax of its processed logits."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Counts its output tokens."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """Its logits are changed depending on the output so far."""
        return self.has_penalties or self.min_new_tokens > 0 or self.processor is not None

    @property
    def is_adjusted(self) -> bool:
        """Its logits are changed before they are ranked or drawn from."""
        return self.needs_history or bool(self.logit_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHistory:
    """The output before the token that one row produces: ``committed`` followed by ``drafts``.

    ``committed``  the request's committed output ids, x_0 included and the prompt not: shared by its rows, only read
    ``drafts``     x_1..x_j for position j of a verify, all held drafts for a draft row
    ``counts``     of ``committed``; required by requests with penalties
    """

    committed: Sequence[int]
    drafts: Sequence[int] = ()
    counts: TokenCounts | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens before the row's own."""
        return len(self.committed) + len(self.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """What each of T logits rows is for.

    ``request_indices``  host ints, T: the row's request within the ``requests`` passed beside
    ``positions``        int64 ``[T]`` on the logits' device: absolute position (prompt included) of the token to
                         produce, one past its input token's. The host never reads it, so a running step may make it
    ``histories``        by row, for rows of requests with ``needs_history`` (others are ignored)
    """

    request_indices: Sequence[int]
    positions: torch.Tensor
    histories: Mapping[int, OutputHistory] = field(default_factory=dict)


def host_to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[float]], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Host values as a tensor; pinned on the way to a GPU, since a pageable copy would wait for the stream."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _require(is_valid: bool, name: str, value: float, wanted: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {value}; it must be {wanted}")
