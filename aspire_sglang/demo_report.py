"""What the demo found, and the table that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One complete answer."""

    text: str
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """Both runs. ``counters`` are ASPIRE's for the run alone (:class:`aspire_sglang.counters.StepCounts`)."""

    aspire_answers: tuple[Answer, ...]
    plain_answers: tuple[Answer, ...]
    aspire_seconds: float
    plain_seconds: float
    counters: Mapping[str, float]
    is_exact: bool  # float32: equal answers are guaranteed, not merely likely

    @property
    def is_identical(self) -> bool:
        """Text, length and reason of every answer agree."""
        return self.aspire_answers == self.plain_answers


def render_report(report: Report) -> str:
    """The summary as text of several lines."""
    count = report.counters
    tokens = sum(answer.num_tokens for answer in report.aspire_answers)
    plain_tokens = sum(answer.num_tokens for answer in report.plain_answers)
    rows = [
        ("tokens", f"{tokens} (plain: {plain_tokens})"),
        ("tokens per verify", _ratio(count["tokens_committed"], count["verify_rows"], "{:.2f}")),
        ("acceptance", _ratio(count["drafts_accepted"], count["drafts_verified"], "{:.1%} of verified drafts")),
        (
            "KV read while drafting",
            _ratio(count["draft_kv_tokens_read"], count["draft_kv_tokens_full"], "{:.1%} of full attention"),
        ),
        ("mixed steps", f"{count['mixed_steps']:.0f} of {count['steps']:.0f}"),
        ("seconds to answer both", f"{report.aspire_seconds:.1f} (plain: {report.plain_seconds:.1f})"),
        ("output identical to plain decoding", "yes" if report.is_identical else "no"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = ["", *(f"{name + ':':<{width + 1}} {value}" for name, value in rows)]
    if not report.is_identical:
        lines += ["", _first_difference(report)]
    if report.is_exact:
        lines += [
            "",
            "On a CPU this shows the algorithm in the real engine, not its speed: PyTorch is the attention kernel.",
        ]
    return "\n".join(lines)


def _ratio(part: float, whole: float, form: str) -> str:
    return form.format(part / whole) if whole else "none"


def _first_difference(report: Report) -> str:
    """Where the first pair of unequal answers parts, and how to read it."""
    ours, plain = next(
        pair for pair in zip(report.aspire_answers, report.plain_answers, strict=True) if pair[0] != pair[1]
    )
    at = next(
        (i for i, (left, right) in enumerate(zip(ours.text, plain.text, strict=False)) if left != right),
        min(len(ours.text), len(plain.text)),
    )
    where = f"first difference at character {at}: {ours.text[at : at + 40]!r}, plain {plain.text[at : at + 40]!r}"
    if report.is_exact:
        return f"{where}\nIn float32 the answers must be equal: please report this as a bug."
    return (
        f"{where}\nOn a GPU the shape of a batch changes the rounding of bfloat16, so two tokens whose logits nearly "
        "tie may swap; one swapped token changes the rest of the text."
    )
