"""Rows as conversations: what trains is marked, what cannot be said is counted, and they come back as samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforgerl.errors import InputError
from openforgerl.formats import AttemptRecord, Imported, Report, open_writer, read_conversations, samples_of
from openforgerl.formats.atif_schema import Document
from openforgerl.formats.importing import EMPTY_TURN
from openforgerl.rendering.renderer import ChatRenderer
from openforgerl.types import Conversation, Message, Reasoning, Role, Sample, Source, Text, ThreadRole

from .conftest import record_of


def write(name: str, out: Path, records: list[AttemptRecord]) -> Report:
    with open_writer(name, out) as writer:
        for record in records:
            writer.add(record)
        return writer.close()


def text(role: Role, words: str) -> Message:
    return Message(role=role, parts=(Text(words),))


def assistant(words: str, thought: str = "") -> Message:
    return Message(role=Role.ASSISTANT, parts=(*((Reasoning(thought),) if thought else ()), Text(words)))


def trained_text(sample: Sample, renderer: ChatRenderer) -> list[str]:
    return [renderer.decode(sample.ids[span.start : span.stop]) for span in sample.spans if span.state == "trained"]


# -- OpenAI lines


def test_openai_lines_train_what_the_row_trains(records: list[AttemptRecord], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    report = write("openai-jsonl", out, records)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert report.rows == len(lines) == 1 + 4 + 1 + 1
    assert report.lost["rows without a turn that trains"] == 2
    assert report.lost["rewards (one per row)"] == 7
    assert report.lost["token ids (text only)"] == report.tokens
    whole = lines[0]
    assert [message["role"] for message in whole["messages"]] == [
        "system",
        "user",
        *["assistant", "tool"] * 3,
        "assistant",
    ]
    assert not any("weight" in message for message in whole["messages"])
    assert whole["tools"][0]["function"]["name"] == "bash"
    call = whole["messages"][2]["tool_calls"][0]
    assert isinstance(call["function"]["arguments"], str)
    assert whole["messages"][3]["tool_call_id"] == call["id"]
    # With thoughts stripped, each row trains its last turn alone: the others were sampled after other context.
    for number, line in enumerate(lines[1:5]):
        turns = [message for message in line["messages"] if message["role"] == "assistant"]
        assert [message.get("weight", 1) for message in turns] == [0] * number + [1]
        assert turns[-1]["reasoning_content"]


def test_openai_lines_come_back_as_the_same_conversations(records: list[AttemptRecord], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    write("openai-jsonl", out, records[:2])
    read = read_conversations(out)
    for one, line in zip(read, out.read_text().splitlines(), strict=True):
        row = json.loads(line)
        leaf = [call for record in records[:2] for call in record.calls if call.answer is not None]
        match = next(c for c in leaf if (*c.conversation.messages, c.answer) == one.conversation.messages)
        assert match.conversation.tools == one.conversation.tools
        weights = [m.get("weight", 1) for m in row["messages"] if m["role"] == "assistant"]
        assert len(one.trains) == sum(weights)


def test_a_cut_row_and_a_half_masked_turn_are_counted(records: list[AttemptRecord], tmp_path: Path) -> None:
    """One turn's second half is masked: the message as a whole must not train, and its first half is lost."""
    record = records[0]
    sample = record.samples.samples[0]
    first = sample.spans[0]
    middle = first.start + 3
    halves = (
        msgspec.structs.replace(first, stop=middle),
        msgspec.structs.replace(first, start=middle, offset=3, state="masked", reason="stale"),
    )
    changed = msgspec.structs.replace(sample, spans=(*halves, *sample.spans[1:]))
    samples = msgspec.structs.replace(record.samples, samples=(changed,))
    report = write("openai-jsonl", tmp_path / "rows.jsonl", [msgspec.structs.replace(record, samples=samples)])
    assert report.lost["trained tokens of turns that are not shown whole"] == 3
    line = json.loads((tmp_path / "rows.jsonl").read_text())
    assert [m.get("weight", 1) for m in line["messages"] if m["role"] == "assistant"] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": []}', "rows.jsonl:2: messages: must hold at least one message"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"rows.jsonl:2: messages\[0\].role: must be one of"),
        ('{"messages": [{"role": "assistant", "content": "x", "weight": 2}]}', "rows.jsonl:2: weight must be 0 or 1"),
        ("[1]", "rows.jsonl:2: the line is no JSON object"),
        ("nonsense", "rows.jsonl:2: JSON is malformed"),
    ],
)
def test_bad_lines_are_refused_by_number(line: str, said: str, tmp_path: Path) -> None:
    good = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}'
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(InputError, match=said):
        read_conversations(tmp_path / "rows.jsonl")


# -- importing


def test_an_imported_conversation_is_one_row_in_which_its_answers_train(renderer: ChatRenderer) -> None:
    conversation = Conversation(
        messages=(
            text(Role.SYSTEM, "You are an agent."),
            text(Role.USER, "count"),
            assistant("one"),
            text(Role.USER, "more"),
            assistant("two"),
            text(Role.USER, "more"),
            assistant("three"),
        )
    )
    found = samples_of(Imported(clock=0.0, name="x", conversation=conversation, trains=frozenset({2, 4, 6})), renderer)
    (sample,) = found.samples
    assert sample.source is Source.IMPORT and sample.logprobs is None
    assert trained_text(sample, renderer) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    prompt = renderer.render(
        msgspec.structs.replace(conversation, messages=conversation.messages[:-1]), restored={}, clock=0.0, kwargs={}
    )
    assert sample.ids[: sample.spans[-1].start] == prompt.ids  # what the model will see in front of its last answer


def test_untrained_turns_are_context_and_stripped_thoughts_make_rows(renderer: ChatRenderer) -> None:
    conversation = Conversation(
        messages=(
            text(Role.USER, "a"),
            assistant("one", "hm"),
            text(Role.USER, "b"),
            assistant("two", "so"),
            text(Role.USER, "c"),
            assistant("three", "ah"),
        )
    )
    found = samples_of(Imported(clock=0.0, name="x", conversation=conversation, trains=frozenset({1, 5})), renderer)
    assert [trained_text(sample, renderer) for sample in found.samples] == [
        ["<think>\nhm\n</think>\n\none<|im_end|>"],
        ["<think>\nah\n</think>\n\nthree<|im_end|>"],
    ]
    assert "hm" not in renderer.decode(found.samples[1].ids) and "so" not in renderer.decode(found.samples[1].ids)
    assert "two" in renderer.decode(found.samples[1].ids)


def test_a_conversation_that_begins_with_a_trained_answer_is_refused(renderer: ChatRenderer) -> None:
    conversation = Conversation(messages=(assistant("hello"),))
    with pytest.raises(InputError, match=r"f:1: messages\[0\] is an assistant turn that trains"):
        samples_of(Imported(clock=0.0, name="f:1", conversation=conversation, trains=frozenset({0})), renderer)
    with pytest.raises(ValueError, match="only assistant turns train"):
        Imported(
            clock=0.0, name="x", conversation=Conversation(messages=(text(Role.USER, "a"),)), trains=frozenset({0})
        )


def test_export_and_import_give_the_ids_that_were_sampled(
    records: list[AttemptRecord], renderer: ChatRenderer, tmp_path: Path
) -> None:
    """Answers in the tokenizer's own encoding survive the way through text; the rows' spans are the same."""
    for name, out in (("openai-jsonl", tmp_path / "rows.jsonl"), ("atif", tmp_path / "atif")):
        write(name, out, records[:2])
        read = [sample for one in read_conversations(out) for sample in samples_of(one, renderer).samples]
        wanted = [sample for record in records[:2] for sample in record.samples.samples]
        assert [sample.ids for sample in read] == [sample.ids for sample in wanted]
        assert [[(s.start, s.stop) for s in sample.spans] for sample in read] == [
            [(s.start, s.stop) for s in sample.spans] for sample in wanted
        ]


# -- ATIF


def documents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


def check_atif(document: dict[str, Any]) -> None:
    """The rules that harbor's models enforce beyond field names and types (read in harbor 0.26)."""
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    for step in document["steps"]:
        assert step["source"] in ("system", "user", "agent") and "message" in step
        agent_only = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}
        assert step["source"] == "agent" or not agent_only & step.keys()
        made = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for call in step.get("tool_calls", ()):
            assert isinstance(call["arguments"], dict)
        for result in step.get("observation", {}).get("results", ()):
            assert result["source_call_id"] in made
        metrics = step.get("metrics")
        if metrics is not None:
            assert len(metrics["completion_token_ids"]) == metrics["completion_tokens"] == len(metrics["logprobs"])
            assert len(metrics["prompt_token_ids"]) == metrics["prompt_tokens"]


def test_atif_documents_hold_what_the_engine_saw_and_sampled(records: list[AttemptRecord], tmp_path: Path) -> None:
    out = tmp_path / "atif"
    report = write("atif", out, records)
    assert sorted(path.name for path in out.iterdir())[:2] == ["r0-a0-0.json", "r1-a0-0.json"]
    assert report.rows == 9
    assert report.lost == {"calls that are in no row (retries, aborted)": 4}
    calls = {(record.attempt.attempt_id, call.call_id): call for record in records for call in record.calls}
    seen = 0
    for document in documents(out):
        check_atif(document)
        for step in document["steps"]:
            if "metrics" in step:
                call = calls[document["session_id"], step["extra"]["call_id"]]
                assert tuple(step["metrics"]["prompt_token_ids"]) == call.prompt.ids
                assert tuple(step["metrics"]["completion_token_ids"]) == call.sampled_ids
                assert tuple(step["metrics"]["logprobs"]) == call.logprobs
                assert step["timestamp"].endswith("+00:00")
                seen += len(call.sampled_ids)
    totals = [record.samples.totals for record in records]
    assert seen == sum(one.trained + sum(one.masked.values()) for one in totals)


def test_atif_marks_what_must_not_train_and_links_what_follows(records: list[AttemptRecord], tmp_path: Path) -> None:
    write("atif", tmp_path / "atif", records[1:3])
    stripped = documents(tmp_path / "atif")[:4]
    for number, document in enumerate(stripped):
        turns = [step for step in document["steps"] if step["source"] == "agent"]
        assert [step.get("is_copied_context", False) for step in turns] == [True] * number + [False]
        assert turns[-1]["reasoning_content"]
        following = None if number == 3 else f"r1-a0-{number + 1}.json"
        assert document.get("continued_trajectory_ref") == following
    aside = [document for document in documents(tmp_path / "atif")[4:] if document["extra"]["role"] == ThreadRole.SIDE]
    assert len(aside) == 2
    for document in aside:
        assert document["steps"][-1]["is_copied_context"] is True  # masked: ATIF's way to say "do not train"
    assert stripped[0]["extra"]["verdict"]["reward"] == 0.0
    assert stripped[0]["agent"]["version"] == "1.2"


def test_arguments_that_are_no_object_are_kept_beside(scenarios: Any, renderer: ChatRenderer, tmp_path: Path) -> None:
    session = scenarios.Session(renderer, 1, scenarios.Size(turns=1, system=3, answer=2, observation=2))
    agent = scenarios.Agent.new(session)
    agent.turn(arguments='{"command": ls -la')  # no JSON
    agent.turn(arguments='{"b": 1,  "a": 2}')
    report = write("atif", tmp_path / "atif", [record_of(session.calls)])
    (document,) = documents(tmp_path / "atif")
    check_atif(document)
    made = [call for step in document["steps"] for call in step.get("tool_calls", ())]
    raws = [call["extra"]["arguments_raw"] for call in made]
    sent = [call.arguments for one in session.calls for call in (one.answer.tool_calls if one.answer else ())]
    assert raws == sent and made[1]["arguments"] == {"a": 2, "b": 1}
    assert made[0]["arguments"] == {} and "ls -la" in sent[0]
    assert report.lost == {"arguments that are no object (their text is in extra.arguments_raw)": 1}
    (one,) = read_conversations(tmp_path / "atif")
    last = session.calls[-1]
    assert one.conversation.messages == (*last.conversation.messages, last.answer)


def test_foreign_atif_is_read_as_its_rules_say(tmp_path: Path) -> None:
    """A terminus-like agent: observations without call ids, a copied step, a dispatch without a model, a sub-agent."""
    inner = {
        "schema_version": "ATIF-v1.7",
        "trajectory_id": "sub",
        "agent": {"name": "a", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "inner task"},
            {"step_id": 2, "source": "agent", "message": "inner answer"},
        ],
    }
    document = {
        "schema_version": "ATIF-v1.6",
        "agent": {"name": "terminus-2", "version": "2.0", "model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "be good"},
            {
                "step_id": 2,
                "source": "user",
                "message": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}],
            },
            {"step_id": 3, "source": "agent", "message": "old", "is_copied_context": True},
            {
                "step_id": 4,
                "source": "agent",
                "message": "ls",
                "reasoning_content": "look",
                "observation": {"results": [{"content": "a.txt"}]},
            },
            {
                "step_id": 5,
                "source": "agent",
                "message": "",
                "tool_calls": [{"tool_call_id": "t1", "function_name": "done", "arguments": {"ok": True}}],
                "observation": {"results": [{"source_call_id": "t1", "content": "bye"}]},
            },
            {"step_id": 6, "source": "agent", "message": "dispatched", "llm_call_count": 0},
        ],
        "subagent_trajectories": [inner],
    }
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(document))
    main, sub = read_conversations(path)
    assert [message.role.value for message in main.conversation.messages] == [
        "system", "user", "assistant", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert main.conversation.messages[1].text == "go on"
    assert main.conversation.messages[3].reasoning == "look"
    assert main.conversation.messages[5].tool_calls[0].arguments == '{"ok":true}'
    assert main.conversation.messages[6].tool_call_id == "t1"
    assert main.trains == {3, 5}
    assert sub.trains == {1} and sub.name.endswith("trajectory.json/0-sub")


GOOD = {
    "schema_version": "ATIF-v1.8",
    "agent": {"name": "a", "version": "1"},
    "steps": [{"step_id": 1, "source": "user", "message": "x"}, {"step_id": 2, "source": "agent", "message": "y"}],
}


def test_sub_agents_of_one_id_are_two_conversations(tmp_path: Path) -> None:
    inner = GOOD | {"trajectory_id": "0"}
    (tmp_path / "t.json").write_text(json.dumps(GOOD | {"subagent_trajectories": [inner, GOOD, inner]}))
    assert len({one.name for one in read_conversations(tmp_path / "t.json")}) == 4


def test_a_template_is_told_the_date_of_the_record(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    steps: Any = GOOD["steps"]
    dated = [steps[0] | {"timestamp": "2026-03-04T05:06:07Z"}, steps[1] | {"timestamp": "2026-03-05T00:00:00Z"}]
    path.write_text(json.dumps(GOOD | {"steps": dated}))
    assert [one.clock for one in read_conversations(path)] == [1772600767.0]
    for silent in (steps, [steps[0] | {"timestamp": "yesterday"}, steps[1]]):
        path.write_text(json.dumps(GOOD | {"steps": silent}))
        assert [one.clock for one in read_conversations(path)] == [path.stat().st_mtime]


@pytest.mark.parametrize(
    ("answer", "trains", "note"),
    [
        ({"content": "y"}, {1}, ""),
        ({"content": None, "refusal": "no"}, set(), "messages[].refusal is not read"),
        ({"text": "y"}, set(), "messages[].text is not read"),
        ({"content": "", "toolCalls": []}, set(), "messages[].toolCalls is not read"),
        ({"content": "y", "thinking": "deep"}, {1}, "messages[].thinking is not read"),
    ],
)
def test_what_a_line_loses_is_noted_and_an_empty_turn_does_not_train(
    answer: dict[str, Any], trains: set[int], note: str, tmp_path: Path
) -> None:
    line = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"} | answer]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line))
    (one,) = read_conversations(tmp_path / "rows.jsonl")
    assert one.trains == trains
    assert (EMPTY_TURN in one.notes) == (not trains)
    assert [said for said in one.notes if said != EMPTY_TURN] == ([note] if note else [])


def test_keys_that_say_what_the_model_saw_are_noted(tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "id": 7}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line | {"functions": [{"name": "f"}]}))
    (one,) = read_conversations(tmp_path / "rows.jsonl")
    assert one.notes == ("functions is not read",)


@pytest.mark.parametrize("name", ["rows.jsonl", "t.json"])
def test_what_lies_too_deep_is_refused(name: str, tmp_path: Path) -> None:
    deep = "[" * 5000 + "]" * 5000
    form = '{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}'
    for nested in (deep, "[" * 400 + "]" * 400):
        tool = form % nested
        if name == "rows.jsonl":
            text = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], '
            text += f'"tools": [{tool}]}}'
        else:
            agent = f'{{"name": "a", "version": "1", "tool_definitions": [{tool}]}}'
            text = json.dumps(GOOD | {"agent": 0}).replace('"agent": 0', f'"agent": {agent}')
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=f"{name}.*(deep|nested)"):
            read_conversations(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": "ATIF-v2.0"}, "known: ATIF-v1.0 to ATIF-v1.8"),
        ({"steps": []}, "step_id 1, 2, 3"),
        ({"steps": [{"step_id": 2, "source": "user", "message": "x"}]}, "step_id 1, 2, 3"),
        (
            {"steps": [{"step_id": 1, "source": "robot", "message": "x"}]},
            r"Invalid enum value 'robot'.*steps\[0\].source",
        ),
        (
            {"steps": [{"step_id": 1, "source": "user", "message": [{"type": "image", "source": None}]}]},
            "step 1 holds image; only text",
        ),
    ],
)
def test_bad_atif_is_refused_with_file_and_field(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = {
        "schema_version": "ATIF-v1.8",
        "agent": {"name": "a", "version": "1"},
        "steps": [{"step_id": 1, "source": "user", "message": "x"}],
    }
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good))
    assert isinstance(msgspec.json.decode(path.read_bytes(), type=Document), Document)
    path.write_text(json.dumps(good | change))
    with pytest.raises(InputError, match=said):
        read_conversations(path)


def test_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("")
    with pytest.raises(InputError, match=r"\.jsonl \(OpenAI messages\), or ATIF"):
        read_conversations(tmp_path / "x.csv")
    with pytest.raises(InputError, match="holds no ATIF document"):
        (tmp_path / "empty").mkdir()
        read_conversations(tmp_path / "empty")
