"""The real HTTP server with ``--spec-algorithm aspire``: its APIs, figures, request options, aborts and bad requests.

One server serves all tests of this file; stock SGLang in the test process is the reference for its answers.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("openai")

import openai

from tests.support.server import Server, running_server

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

NUM_DRAFTS = 4  # of every full cycle
CONTEXT_LEN = 1024
# Three of up to 64 pages: drafts get rejected. A log interval shorter than a cycle: some intervals hold no verify.
OPTIONS = f"""--spec-algorithm aspire --aspire-policy fixed:{NUM_DRAFTS} --aspire-draft-max 8 --aspire-min-pages 3
--aspire-recent-pages 1 --aspire-ratio 0.01 --dtype float32 --context-length {CONTEXT_LEN} --max-total-tokens 8192
--max-running-requests 8 --random-seed 7 --enable-metrics --enable-cache-report --decode-log-interval 2"""
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 6
GREEDY = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with running_server(llama, log_path, *OPTIONS.split(), env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(llama: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(llama)


@pytest.fixture(scope="module")
def plain_answer(stock_outputs: Callable[..., list[Any]], tokenizer: Any) -> list[int]:
    """Stock SGLang's greedy answer to ``TEXT``."""
    ids: list[int] = stock_outputs([tokenizer.encode(TEXT)], GREEDY)[0].output_ids
    return ids


def events(answer: Any) -> list[dict[str, Any]]:
    """The JSON payloads of a server-sent event stream."""
    lines = [line for line in answer.iter_lines(decode_unicode=True) if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_every_api_gives_the_answer_of_plain_decoding(
    server: Server, client: Any, tokenizer: Any, plain_answer: list[int]
) -> None:
    """/generate by text and by ids, two greedy choices (n=2), the completions API with and without a stream."""
    by_text = server.generate(TEXT, GREEDY)
    assert by_text["output_ids"] == plain_answer
    assert server.generate(tokenizer.encode(TEXT), GREEDY)["output_ids"] == plain_answer
    assert [each["output_ids"] for each in server.generate(TEXT, {**GREEDY, "n": 2})] == [plain_answer] * 2
    request = {"model": "m", "prompt": TEXT, "temperature": 0.0, "max_tokens": GREEDY["max_new_tokens"]}
    request["extra_body"] = {"ignore_eos": True}
    assert client.completions.create(**request).choices[0].text == by_text["text"]
    assert [choice.text for choice in client.completions.create(**request, n=2).choices] == [by_text["text"]] * 2
    stream = client.completions.create(**request, stream=True)
    assert "".join(part.choices[0].text for part in stream) == by_text["text"]


def test_sampled_choices_are_their_own(server: Server) -> None:
    """n=2 at temperature 1 draws two different texts; the same seed draws the same text again."""
    sampled = {**GREEDY, "temperature": 1.0}
    first, second = server.generate(TEXT, {**sampled, "n": 2})
    assert first["output_ids"] != second["output_ids"]
    seeded = [server.generate(TEXT, {**sampled, "sampling_seed": 5})["output_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    choices = [
        [choice["output_ids"] for choice in server.generate(TEXT, {**sampled, "sampling_seed": 5, "n": 3})]
        for _ in range(2)
    ]
    assert choices[0] == choices[1]
    assert choices[0][0] == seeded[0]
    assert len({tuple(ids) for ids in choices[0]}) == 3


def test_a_stream_sends_something_new_with_every_event(server: Server, plain_answer: list[int]) -> None:
    """Drafting steps send nothing, a verify sends its run: events have growing token counts and the whole answer."""
    parts = events(server.generate_raw(TEXT, GREEDY, stream=True))
    counts = [part["meta_info"]["completion_tokens"] for part in parts]
    assert counts == sorted(set(counts))
    assert counts[-1] == len(plain_answer)
    assert any(later - earlier > 1 for earlier, later in pairwise(counts))
    assert parts[-1]["text"] == server.generate(TEXT, GREEDY)["text"]


def test_three_turns_of_a_chat(
    server: Server, client: Any, tokenizer: Any, stock_outputs: Callable[..., list[Any]]
) -> None:
    """Each turn hits the cache for all verified tokens of the turn before, and answers as stock SGLang does.

    A random model writes bytes that are no text; a bias towards upper-case letters and digits, which no merge of the
    tokenizer joins, makes its answers survive the way through text.
    """
    allowed = set(tokenizer.convert_tokens_to_ids(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")))
    bias = {str(token): -100.0 for token in range(len(tokenizer)) if token not in allowed}
    messages: list[dict[str, str]] = []
    prompts, answers, cached = [], [], []
    for question in (TEXT, "And then? " * 3, "Say that again."):
        messages.append({"role": "user", "content": question})
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        reply = client.chat.completions.create(
            model="m", messages=messages, temperature=0.0, max_tokens=40, logit_bias=bias
        )
        assert reply.usage.prompt_tokens == len(prompts[-1])
        details = reply.usage.prompt_tokens_details
        cached.append(details.cached_tokens if details is not None else 0)
        answers.append(reply.choices[0].message.content)
        messages.append({"role": "assistant", "content": answers[-1]})

    sampling = {"temperature": 0.0, "max_new_tokens": 40, "logit_bias": bias}
    expected = [output.output_ids for output in stock_outputs(prompts, sampling)]
    assert answers == [tokenizer.decode(ids) for ids in expected]
    for turn in (0, 1):
        history = prompts[turn] + expected[turn]
        assert prompts[turn + 1][: len(history)] == history
        assert cached[turn + 1] >= len(history) - 1  # the last token has been sampled, not read


def test_meta_info_counts_verified_drafts_only(server: Server) -> None:
    """Rate = accepted / really verified drafts; histograms, counts and lengths tell one story; some were rejected."""
    answer = server.generate(TEXT, {**GREEDY, "max_new_tokens": 96})
    meta = answer["meta_info"]
    correct, proposed, verifies = (
        meta[name] for name in ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct")
    )
    accepted_of, proposed_of = meta["spec_correct_drafts_histogram"], meta["spec_cap_lens_histogram"]
    assert sum(accepted_of) == sum(proposed_of) == verifies
    assert sum(size * count for size, count in enumerate(accepted_of)) == correct
    assert sum(size * count for size, count in enumerate(proposed_of)) == proposed
    assert len(proposed_of) == NUM_DRAFTS + 1
    assert proposed_of[NUM_DRAFTS] >= verifies - 1  # the last cycle may be shorter
    assert 0 < correct < proposed
    assert meta["spec_accept_rate"] == pytest.approx(correct / proposed)
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / verifies)
    # The first token comes from prefill; the last run may be longer than the answer.
    assert 0 <= 1 + verifies + correct - meta["completion_tokens"] <= NUM_DRAFTS


def test_request_options_lower_the_drafts(server: Server, client: Any, plain_answer: list[int]) -> None:
    """``draft_max`` bounds every draft of the request, ``enabled: false`` makes it plain; the answer stays."""
    for options, longest in (({"draft_max": 2}, 2), ({"draft_max": 0}, 0), ({"enabled": False}, 0), ({}, NUM_DRAFTS)):
        answer = server.generate(TEXT, {**GREEDY, "custom_params": {"aspire": options}})
        assert answer["output_ids"] == plain_answer
        assert len(answer["meta_info"]["spec_cap_lens_histogram"]) == longest + 1, options
    before = server.internal_state()["aspire"]["draft_rows"]
    body = {"custom_params": {"aspire": {"enabled": False}}, "ignore_eos": True}
    client.completions.create(model="m", prompt=TEXT, temperature=0.0, max_tokens=8, extra_body=body)
    assert server.internal_state()["aspire"]["draft_rows"] == before


def test_metrics_stay_within_their_ranges(server: Server) -> None:
    """Gauges sampled during requests: rate in 0..1, length in 0..drafts + 1; intervals without a verify included."""
    before = server.metrics()["sglang:spec_verify_calls_total"]
    worker = threading.Thread(target=server.generate, args=(TEXT, {**GREEDY, "max_new_tokens": 300, "n": 2}))
    worker.start()
    samples = [server.metrics()]
    while worker.is_alive():
        samples.append(server.metrics())
        time.sleep(0.1)
    worker.join()
    for sample in samples:
        assert 0.0 <= sample["sglang:spec_accept_rate"] <= 1.0
        assert 0.0 <= sample["sglang:spec_accept_length"] <= NUM_DRAFTS + 1
    assert any(0.0 < sample["sglang:spec_accept_rate"] < 1.0 for sample in samples)
    verifies = server.metrics()["sglang:spec_verify_calls_total"] - before
    assert 2 * 300 / (NUM_DRAFTS + 1) <= verifies <= 2 * 300


def test_server_info_shows_the_counters(server: Server) -> None:
    """``internal_states[0]["aspire"]``: settings, and totals that add up over one request."""
    before = server.internal_state()["aspire"]
    meta = server.generate(TEXT, GREEDY)["meta_info"]
    after = server.internal_state()["aspire"]
    assert (after["policy"], after["selector"]) == (f"fixed:{NUM_DRAFTS}", "refresh")
    grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    assert grown["verify_rows"] == meta["spec_verify_ct"]
    assert grown["drafts_verified"] == meta["spec_num_proposed_drafts"]
    assert grown["drafts_accepted"] == meta["spec_num_correct_drafts"]
    assert grown["steps"] == grown["draft_rows"] + grown["verify_rows"]
    assert 0 < grown["draft_kv_tokens_read"] < grown["draft_kv_tokens_full"]


def test_a_client_that_goes_away_leaves_an_idle_server(server: Server, plain_answer: list[int]) -> None:
    """Disconnecting during drafting aborts: few more tokens are made, the cache can be emptied, service goes on."""
    before = server.internal_state()["aspire"]["tokens_committed"]
    wanted = 700
    for num_events in (1, 3, 6):
        answer = server.post(
            "/generate",
            {"text": TEXT, "sampling_params": {**GREEDY, "max_new_tokens": wanted}, "stream": True},
            stream=True,
        )
        for _, _line in zip(range(2 * num_events), answer.iter_lines(), strict=False):
            pass
        answer.close()
    flush_when_idle(server)
    assert server.internal_state()["aspire"]["tokens_committed"] - before < wanted
    assert server.generate(TEXT, GREEDY)["output_ids"] == plain_answer


def flush_when_idle(server: Server, seconds: float = 30.0) -> None:
    """``/flush_cache`` is refused while a request runs; it must succeed once the server is idle."""
    deadline = time.monotonic() + seconds
    while (answer := server.post("/flush_cache")).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)


def sampling(**params: Any) -> dict[str, Any]:
    return {"text": "ab", "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, **params}}


def aspire(options: Any) -> dict[str, Any]:
    return sampling(custom_params={"aspire": options})


CHAT = {"model": "m", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}
BAD_REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown stop token": ("/generate", sampling(stop_token_ids=[-1], min_new_tokens=4), "stop_token_ids holds -1"),
    "stop token too large": ("/generate", sampling(stop_token_ids=[9**6], min_new_tokens=4), "token ids are 0 to"),
    "logprobs": ("/generate", {**sampling(), "return_logprob": True}, "logprobs are not supported.*leave"),
    "chat logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True}, "logprobs are not supported.*leave"),
    "json schema": ("/generate", sampling(json_schema='{"type": "object"}'), "structured output.*leave the schema"),
    "regex": ("/generate", sampling(regex="a+"), "structured output.*leave the schema"),
    "ebnf": ("/generate", sampling(ebnf='root ::= "a"'), "structured output.*leave the schema"),
    "response format": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object"}},
        "structured output.*leave the schema",
    ),
    "hidden states": ("/generate", {**sampling(), "return_hidden_states": True}, "hidden states"),
    "options: text": ("/generate", aspire("fast"), "'fast'; it must be an object with draft_max, enabled"),
    "options: list": ("/generate", aspire([1]), r"\[1\]; it must be an object"),
    "options: deep list": ("/generate", aspire([[1]]), r"\[\[1\]\]; it must be an object"),
    "options: unknown": ("/generate", aspire({"drafts": 3}), "unknown.*'drafts'; known: draft_max, enabled"),
    "options: negative": ("/generate", aspire({"draft_max": -1}), "is -1; it must be a whole number, 0 or more"),
    "options: bool": ("/generate", aspire({"draft_max": True}), "is True; it must be a whole number"),
    "options: text number": ("/generate", aspire({"draft_max": "3"}), "is '3'; it must be a whole number"),
    "options: fraction": ("/generate", aspire({"draft_max": 1.5}), "is 1.5; it must be a whole number"),
    "options: int for bool": ("/generate", aspire({"enabled": 0}), "is 0; it must be true or false"),
    "options: nested": ("/generate", aspire({"draft_max": {"a": {"b": 1}}}), "it must be a whole number"),
    "options: chat": ("/v1/chat/completions", {**CHAT, "custom_params": {"aspire": 1}}, "is 1; it must be an object"),
    "foreign nested": ("/generate", sampling(custom_params={"x": {"y": {"z": 1}}}), "custom_params is .*Expected"),
    "custom_params text": ("/generate", sampling(custom_params="x"), "custom_params is 'x': Expected"),
    "fractional top_k": ("/generate", sampling(top_k=1.5), "top_k is 1.5: Expected `int`"),
    "text seed": ("/generate", sampling(sampling_seed="x"), "sampling_seed is 'x': Expected `int"),
    "unknown parameter": ("/generate", sampling(tempurature=1), "unknown sampling parameter 'tempurature'"),
    "negative temperature": ("/generate", sampling(temperature=-1), "temperature must be a non-negative.*-1"),
    "over-long prompt": ("/generate", {**sampling(), "text": "A" * 2 * CONTEXT_LEN}, f"longer than.*{CONTEXT_LEN} tok"),
    "empty text": ("/generate", {**sampling(), "text": ""}, "empty"),
    "empty ids": ("/generate", {"input_ids": [], "sampling_params": {}}, "empty"),
    "negative token id": ("/generate", {"input_ids": [5, -3]}, "input_ids holds -3; .* 0 to"),
    "token id too large": ("/generate", {"input_ids": [5, 99999]}, "input_ids holds 99999; .* 0 to"),
}


@pytest.mark.parametrize("case", sorted(BAD_REQUESTS))
def test_a_bad_request_is_refused_and_the_server_goes_on(server: Server, plain_answer: list[int], case: str) -> None:
    """A 4xx that names the value and the fix; the next request gets its right answer."""
    path, payload, words = BAD_REQUESTS[case]
    answer = server.post(path, payload)
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert re.search(words, json.loads(answer.text).get("message") or answer.json()["error"]["message"]), answer.text
    assert server.generate(TEXT, {**GREEDY, "max_new_tokens": 8})["output_ids"] == plain_answer[:8]


def test_a_bad_streamed_request_ends_with_an_error_event(server: Server) -> None:
    """A stream has begun before the request is read: the refusal is its only event."""
    (event,) = events(server.post("/generate", {**aspire("fast"), "stream": True}))
    assert (event["error"]["code"], event["error"]["message"][:13]) == (400, "custom_params")


def test_afterwards_the_server_is_clean(server: Server) -> None:
    """Last of this file: healthy, every KV slot given back, and no figure in the log was ever out of range."""
    assert server.get("/health").status_code == 200
    flush_when_idle(server)
    log = server.log()
    assert "Traceback" not in log
    rates = [float(text) for text in re.findall(r"accept rate: ([-\d.naif]+)", log)]
    assert len(rates) > 50
    assert all(0.0 <= rate <= 1.0 for rate in rates)
