from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from infinity_bento.core import Item, Result, Task
from infinity_bento.engine import MODEL_STAGES, Engine, Mailbox
from infinity_bento.errors import (
    BatchTooLarge,
    ConfigError,
    DeadlineExceeded,
    EmptyInput,
    InferenceError,
    InputTooLong,
    InvalidInput,
    LoadError,
    NotReady,
    Overloaded,
    UnknownModel,
    UnsupportedTask,
)
from infinity_bento.settings import resolve
from tests.conftest import MINILM, embed_items, mixed_texts, vectors

TOLERANCE = 1e-5


class TestExactness:
    """Invariant 1: a row never depends on its neighbours, and equals the oracle."""

    def test_batched_equals_sentence_transformers(self, engine: Engine, oracle: SentenceTransformer) -> None:
        texts = mixed_texts(64)
        ours = vectors(engine.submit_sync(MINILM, embed_items(texts)))
        assert np.abs(ours - oracle.encode(texts)).max() < TOLERANCE

    def test_alone_equals_batched_equals_shuffled(self, engine: Engine) -> None:
        texts = mixed_texts(64, seed=1)
        batched = vectors(engine.submit_sync(MINILM, embed_items(texts)))
        alone = np.concatenate([vectors(engine.submit_sync(MINILM, embed_items([text]))) for text in texts])
        order = list(range(len(texts)))
        random.Random(0).shuffle(order)
        shuffled = vectors(engine.submit_sync(MINILM, embed_items([texts[index] for index in order])))
        assert np.abs(alone - batched).max() < TOLERANCE
        assert np.abs(shuffled - batched[order]).max() < TOLERANCE

    async def test_32_concurrent_clients_get_their_own_rows(self, engine: Engine) -> None:
        texts = mixed_texts(48, seed=2)
        expected = vectors(engine.submit_sync(MINILM, embed_items(texts)))

        async def client(number: int) -> float:
            worst = 0.0
            for index in range(number % 8, len(texts), 8):
                got = vectors(await engine.submit(MINILM, embed_items([texts[index]])))
                worst = max(worst, float(np.abs(got[0] - expected[index]).max()))
            return worst

        assert max(await asyncio.gather(*map(client, range(32)))) < TOLERANCE

    def test_token_ids_are_used_as_given(self, engine: Engine, oracle: SentenceTransformer) -> None:
        text = "What is Deep Learning?"
        ids = oracle.tokenizer(text)["input_ids"]
        from_ids = engine.submit_sync(MINILM, [Item(Task.EMBED, token_ids=ids)])
        from_text = engine.submit_sync(MINILM, embed_items([text]))
        assert np.array_equal(vectors(from_ids), vectors(from_text))

    def test_truncation_equals_the_oracle_and_is_reported(self, engine: Engine, oracle: SentenceTransformer) -> None:
        text = "word " * 800
        (outcome,) = engine.submit_sync(MINILM, embed_items([text]))
        assert isinstance(outcome, Result)
        assert outcome.usage.tokens == 256
        assert outcome.usage.truncated_from == 802
        assert np.abs(outcome.output - oracle.encode([text])[0]).max() < TOLERANCE

    def test_dimensions_are_cut_then_normalized(self, engine: Engine, oracle: SentenceTransformer) -> None:
        got = vectors(engine.submit_sync(MINILM, embed_items(["hello"], dimensions=100)))
        expected = oracle.encode(["hello"])[:, :100]
        expected /= np.linalg.norm(expected)
        assert np.abs(got - expected).max() < TOLERANCE


class TestErrorsAreValues:
    def test_one_bad_item_harms_nobody(self, engine: Engine) -> None:
        items = [*embed_items(["good", "", "fine"]), Item(Task.EMBED, token_ids=[10**9])]
        good, empty, fine, outside = engine.submit_sync(MINILM, items)
        assert isinstance(good, Result)
        assert isinstance(fine, Result)
        assert isinstance(empty, EmptyInput)
        assert isinstance(outside, InvalidInput)
        assert "outside the vocabulary: 0 to 30521" in outside.message

    def test_too_long_without_truncation(self, engine: Engine) -> None:
        (outcome,) = engine.submit_sync(MINILM, embed_items(["word " * 300], truncate=False))
        assert isinstance(outcome, InputTooLong)
        assert "302 tokens, more than the limit of 256" in outcome.message

    def test_too_many_dimensions(self, engine: Engine) -> None:
        (outcome,) = engine.submit_sync(MINILM, embed_items(["a"], dimensions=385))
        assert isinstance(outcome, InvalidInput)
        assert "1 to 384" in outcome.message


class TestRefusals:
    def test_unknown_model_names_the_served_ones(self, engine: Engine) -> None:
        with pytest.raises(UnknownModel, match=f"'nope' is not served here; available: '{MINILM}'"):
            engine.resolve("nope", Task.EMBED)
        with pytest.raises(UnknownModel, match="'nope'"):
            engine.submit_sync("nope", embed_items(["a"]))

    def test_wrong_task_names_what_the_model_can_do(self, engine: Engine) -> None:
        with pytest.raises(UnsupportedTask, match=r"cannot classify; it can embed"):
            engine.resolve(MINILM, Task.CLASSIFY)
        with pytest.raises(UnsupportedTask, match=r"No served model can classify"):
            engine.resolve(None, Task.CLASSIFY)
        with pytest.raises(UnsupportedTask, match="cannot classify"):
            engine.submit_sync(MINILM, [Item(Task.CLASSIFY, text="a")])

    def test_no_name_means_the_only_model(self, engine: Engine) -> None:
        assert engine.resolve(None, Task.EMBED).name == MINILM
        assert engine.resolve("", Task.EMBED).name == MINILM

    def test_an_empty_list(self, engine: Engine) -> None:
        with pytest.raises(EmptyInput, match="at least one"):
            engine.submit_sync(MINILM, [])

    def test_too_many_inputs(self, engine: Engine) -> None:
        with pytest.raises(BatchTooLarge, match=r"2049 inputs, more than the limit of 2048"):
            engine.submit_sync(MINILM, embed_items(["a"] * 2049))


def small(**options: str) -> Engine:
    return Engine.from_settings(resolve(dict(options)))


class TestCapacity:
    async def test_the_surplus_is_refused_at_once_and_the_rest_is_right(self) -> None:
        with small(max_concurrent_requests="8") as engine:
            expected = vectors(engine.submit_sync(MINILM, embed_items(["hello"])))[0]
            answers = await asyncio.gather(
                *(engine.submit(MINILM, embed_items(["hello"])) for _ in range(20)), return_exceptions=True
            )
            refused = [answer for answer in answers if isinstance(answer, Overloaded)]
            assert len(refused) == 12
            assert all(answer.retry_after_seconds >= 1 for answer in refused)
            assert "more than the limit of 8" in refused[0].message
            for answer in answers:
                if isinstance(answer, list):
                    assert np.abs(vectors(answer)[0] - expected).max() < TOLERANCE
            assert len(vectors(await engine.submit(MINILM, embed_items(["again"])))) == 1

    async def test_a_request_that_waits_gets_its_turn_and_leaves_nothing_behind(self) -> None:
        with small(max_concurrent_requests="4") as engine:
            texts = [f"text {number}" for number in range(40)]
            expected = vectors(engine.submit_sync(MINILM, embed_items(texts)))
            waiting = [asyncio.create_task(engine.submit(MINILM, embed_items([text]), wait=True)) for text in texts]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):  # who waits comes before who does not
                await engine.submit(MINILM, embed_items(["newcomer"]))
            for task in waiting[30:]:
                task.cancel()
            answers = await asyncio.wait_for(asyncio.gather(*waiting[:30]), 20)
            assert np.abs(np.concatenate([vectors(answer) for answer in answers]) - expected[:30]).max() < TOLERANCE
            assert engine._models[MINILM].in_flight == 0

    async def test_a_request_that_waits_outlasts_a_queue_full_of_tokens(self) -> None:
        with small(max_batch_tokens="64", max_sequence_length="64") as engine:
            limit = engine._models[MINILM].batcher.max_queue_tokens
            items = embed_items([f"{number} " + "word " * 60 for number in range(2 * limit // 64)])
            tasks = [engine.submit(MINILM, [item], wait=True) for item in items]
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert all(isinstance(answer[0], Result) for answer in answers)
            assert engine._models[MINILM].in_flight == 0

    async def test_who_still_waits_when_the_server_stops_is_refused(self) -> None:
        with small(max_concurrent_requests="1") as engine:
            tasks = [asyncio.create_task(engine.submit(MINILM, embed_items(["a"]), wait=True)) for _ in range(8)]
            await asyncio.sleep(0)
            await asyncio.to_thread(engine.close)
            answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
            assert isinstance(answers[-1], NotReady)
            assert all(isinstance(answer, (list, NotReady)) for answer in answers)

    def test_a_request_larger_than_the_limit_runs_when_nothing_else_does(self) -> None:
        with small(max_concurrent_requests="4") as engine:
            assert len(vectors(engine.submit_sync(MINILM, embed_items(["a"] * 10)))) == 10

    async def test_a_cancelled_request_frees_its_permits_and_is_not_computed(self) -> None:
        with small(max_concurrent_requests="300", max_client_batch_size="300") as engine:
            task = asyncio.create_task(engine.submit(MINILM, embed_items(["word " * 200] * 300)))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The queue holds dropped entries only: the next request waits for running batches, not for 300 texts.
            outcomes = await asyncio.wait_for(engine.submit(MINILM, embed_items(["next"])), 20)
            assert isinstance(outcomes[0], Result)
            assert engine._models[MINILM].in_flight == 0

    def test_a_deadline_is_kept(self) -> None:
        with small() as engine, pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
            engine.submit_sync(MINILM, embed_items(["word " * 200] * 200), timeout_seconds=0.01)

    async def test_the_event_loop_stays_responsive_while_a_megabyte_is_tokenised(self, engine: Engine) -> None:
        task = asyncio.create_task(engine.submit(MINILM, embed_items(["lorem ipsum " * 90_000])))
        worst = 0.0
        loop = asyncio.get_running_loop()
        while not task.done():
            before = loop.time()
            await asyncio.sleep(0.001)
            worst = max(worst, loop.time() - before)
        (outcome,) = await task
        assert isinstance(outcome, Result)
        assert outcome.usage.tokens == 256
        # The tokenizer alone takes several times this; the bound is wide because other work shares the cores.
        assert worst < outcome.timing.tokenize_seconds / 2 + 0.05


class TestLife:
    def test_status_tells_the_stages(self, engine: Engine) -> None:
        status = engine.status()
        assert status.ready
        assert status.stage_count == 1 + len(MODEL_STAGES)
        assert engine.alive

    def test_before_loading_and_after_closing_requests_are_refused(self) -> None:
        engine = Engine(resolve({}))
        with pytest.raises(NotReady, match="loading: stage 1 of 6"):
            engine.resolve(None, Task.EMBED)
        engine.close()
        with pytest.raises(NotReady, match="stopping"):
            engine.submit_sync(MINILM, embed_items(["a"]))

    def test_close_answers_everything_that_waits(self) -> None:
        engine = small()
        answers: list[object] = []

        def client() -> None:
            try:
                answers.append(engine.submit_sync(MINILM, embed_items(["word " * 200] * 100)))
            except NotReady as error:
                answers.append(error)

        thread = threading.Thread(target=client)
        thread.start()
        while not engine._models[MINILM].in_flight:
            pass
        engine.close()
        thread.join(20)
        assert not thread.is_alive()
        assert len(answers) == 1

    def test_a_failed_load_is_told(self, tmp_path: Path) -> None:
        engine = Engine(resolve({"model_id": str(tmp_path / "missing")}))
        with pytest.raises(LoadError, match="missing"):
            engine.load()
        assert engine.status().error is not None
        assert not engine.alive
        with pytest.raises(NotReady, match="could not load"):
            engine.resolve(None, Task.EMBED)

    def test_several_models_in_one_process(self) -> None:
        settings = resolve({"model_id": [MINILM, MINILM], "served_model_name": ["mean", "cls"], "pooling": "mean;cls"})
        with Engine.from_settings(settings) as engine:
            assert [info.pooling for info in engine.infos()] == ["mean", "cls"]
            mean, cls = (vectors(engine.submit_sync(name, embed_items(["hello"]))) for name in ("mean", "cls"))
            assert np.abs(mean - cls).max() > 0.01
            with pytest.raises(InvalidInput, match="Several models can embed: name one of 'mean', 'cls'"):
                engine.resolve(None, Task.EMBED)


class TestOptions:
    def test_max_sequence_length_may_exceed_the_saved_limit_up_to_the_positions(self) -> None:
        with small(max_sequence_length="512") as engine:
            assert engine.infos()[0].max_input_length == 512
        with small(max_sequence_length="4096", warmup="false") as engine:
            (info,) = engine.infos()
            assert info.max_input_length == 512
            assert any("4096 lowered to 512" in note for note in info.notes)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"torch_device": "cuda"}, "torch-device cuda is not there"),
            ({"default_prompt_name": "query"}, "'query' is not a prompt of"),
            ({"max_sequence_length": "300", "max_batch_tokens": "256"}, "max-batch-tokens 256"),
            ({"max_batch_tokens": "64", "auto_truncate": "false"}, "takes inputs of 256 tokens"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(self, options: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            small(**options)

    def test_a_budget_below_the_model_length_cuts_visibly(self) -> None:
        with small(max_batch_tokens="64") as engine:
            (info,) = engine.infos()
            assert info.max_input_length == 64
            assert any("cut at 64 tokens" in note for note in info.notes)
            (outcome,) = engine.submit_sync(MINILM, embed_items(["word " * 100]))
            assert isinstance(outcome, Result)
            assert outcome.usage.truncated_from == 102

    def test_default_prompt_is_put_before_every_text(self, engine: Engine) -> None:
        with small(default_prompt="query: ") as prompted:
            got = vectors(prompted.submit_sync(MINILM, embed_items(["hello"])))
        assert np.abs(got - vectors(engine.submit_sync(MINILM, embed_items(["query: hello"])))).max() < TOLERANCE

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_is_close(self, engine: Engine, dtype: str) -> None:
        texts = mixed_texts(8, seed=3)
        expected = vectors(engine.submit_sync(MINILM, embed_items(texts)))
        with small(dtype=dtype) as half:
            assert half.infos()[0].dtype == dtype
            got = vectors(half.submit_sync(MINILM, embed_items(texts)))
        assert (got * expected).sum(axis=1).min() > 0.999


def test_nan_out_of_a_model_is_an_error_of_that_item(engine: Engine) -> None:
    model = engine._models[MINILM]
    lane = model.lanes[0]
    runner = lane._runner
    word = runner.backbone.module.embeddings.word_embeddings.weight  # type: ignore[attr-defined]
    token = 2748
    kept = word[token].clone()
    word[token] = float("nan")
    try:
        bad, good = engine.submit_sync(MINILM, [Item(Task.EMBED, token_ids=[101, token, 102]), *embed_items(["fine"])])
    finally:
        word[token] = kept
    assert isinstance(bad, InferenceError)
    assert "NaN" in bad.message
    assert isinstance(good, Result)


def test_model_info_is_complete(engine: Engine) -> None:
    (info,) = engine.infos()
    fields = dataclasses.asdict(info)
    assert fields["dimensions"] == 384
    assert fields["pooling"] == "mean"
    assert fields["normalize"] is True
    assert fields["attention"] == "infinity_packed"
    assert fields["source"] == "installed package"
    assert fields["dtype"] == "float32"
    assert fields["tasks"] == (Task.EMBED, Task.EMBED_ALL)


async def test_a_mailbox_wakes_its_loop_once_for_many_and_forgets_nobody() -> None:
    loop = asyncio.get_running_loop()
    mailbox, woken = Mailbox(loop), []
    call = loop.call_soon_threadsafe
    futures: list[asyncio.Future[None]] = [loop.create_future() for _ in range(2000)]
    futures[3].cancel()  # its caller is gone

    def counted(callback: Callable[[], object], *args: object) -> asyncio.Handle:
        woken.append(1)
        return call(callback, *args)

    mailbox.loop = SimpleNamespace(call_soon_threadsafe=counted)  # type: ignore[assignment]
    threads = [
        threading.Thread(target=lambda part=part: [mailbox.deliver(future) for future in part])  # type: ignore[misc]
        for part in (futures[:1000], futures[1000:])
    ]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 10)
    for thread in threads:
        thread.join()
    assert 1 <= len(woken) < 1000
