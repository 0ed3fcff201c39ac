"""A Dockerfile as the process backend reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from openforgerl.errors import TaskError
from openforgerl.tasks import plan_environment
from openforgerl.tasks.dockerfile import parse, workdir_of
from openforgerl.types import Environment, Task


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "environment"
    for relative in ("workspace/a.txt", "workspace/sub/b.txt", "one.txt", "two.txt", "with space.txt"):
        (root / relative).parent.mkdir(parents=True, exist_ok=True)
        (root / relative).write_text(relative)
    return root


def task_of(context: Path, dockerfile: str | None, **environment: object) -> Task:
    (context / "Dockerfile").write_text(dockerfile or "")
    return Task(
        name="sample",
        digest="",
        path=str(context.parent),
        instruction="Do it.",
        environment=Environment(dockerfile=dockerfile, **environment),  # type: ignore[arg-type]
    )


def files(context: Path, dockerfile: str) -> dict[str, str]:
    plan = plan_environment(task_of(context, "FROM debian:12\n" + dockerfile))
    return {inside: str(Path(host).relative_to(context)) for inside, host in plan.files.items()}


def test_the_shape_of_a_bundled_task(context: Path) -> None:
    plan = plan_environment(
        task_of(context, "# syntax=x\nFROM debian:12-slim\nWORKDIR /workspace\nCOPY workspace/ /workspace/\n")
    )
    assert plan.base == "debian:12-slim"
    assert plan.workdir == "/workspace"
    assert plan.files == {
        "/workspace/a.txt": str(context / "workspace/a.txt"),
        "/workspace/sub/b.txt": str(context / "workspace/sub/b.txt"),
    }
    assert plan.notes == ("FROM debian:12-slim: the host's system is used instead",)


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("COPY one.txt /x", {"/x": "one.txt"}),
        ("COPY one.txt /x/", {"/x/one.txt": "one.txt"}),
        ("WORKDIR /x\nCOPY one.txt /x", {"/x/one.txt": "one.txt"}),
        ("WORKDIR /x\nCOPY one.txt .", {"/x/one.txt": "one.txt"}),
        ("WORKDIR /x\nWORKDIR y\nCOPY one.txt z", {"/x/y/z": "one.txt"}),
        ("COPY one.txt two.txt /x/", {"/x/one.txt": "one.txt", "/x/two.txt": "two.txt"}),
        ("COPY *.txt /x/", {f"/x/{name}.txt": f"{name}.txt" for name in ("one", "two", "with space")}),
        ('COPY ["with space.txt", "/x/"]', {"/x/with space.txt": "with space.txt"}),
        ("COPY workspace/sub /x", {"/x/b.txt": "workspace/sub/b.txt"}),
        ("COPY --chown=1:1 one.txt /x", {"/x": "one.txt"}),
        ("ENV D=/data N=n\nCOPY one.txt ${D}/$N.txt", {"/data/n.txt": "one.txt"}),
        ("COPY one.txt /x\nCOPY two.txt /x", {"/x": "two.txt"}),
        ("COPY \\\n  # why\n  one.txt \\\n\n  /x", {"/x": "one.txt"}),
    ],
)
def test_copy(context: Path, dockerfile: str, expected: dict[str, str]) -> None:
    assert files(context, dockerfile) == expected


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("ENV A=1 B='two words' C=\"x\"", {"A": "1", "B": "two words", "C": "x"}),
        ("ENV A some words", {"A": "some words"}),
        ("ENV A=1\nENV B=$A$A", {"A": "1", "B": "11"}),
        (
            "ENV PATH=/opt/x:$PATH",
            {"PATH": "/opt/x:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        ),
    ],
)
def test_env(context: Path, dockerfile: str, expected: dict[str, str]) -> None:
    assert plan_environment(task_of(context, "FROM x\n" + dockerfile)).env == expected


def test_the_task_file_wins_over_the_dockerfile(context: Path) -> None:
    plan = plan_environment(task_of(context, "FROM x\nENV A=1 B=2\nWORKDIR /x\n", env={"A": "3"}, workdir="/w"))
    assert (plan.env, plan.workdir) == ({"A": "3", "B": "2"}, "/w")


def test_what_has_no_effect_is_noted(context: Path) -> None:
    plan = plan_environment(task_of(context, 'FROM x\nLABEL a=b\nCMD ["sleep"]\nUSER root\n'))
    assert plan.notes[1:] == (
        "LABEL a=b: no effect here",
        'CMD ["sleep"]: no effect here',
        "USER root: no effect here",
    )


@pytest.mark.parametrize(
    ("dockerfile", "words"),
    [
        ("FROM x\nRUN apt-get update\n", "line 2: RUN needs a container backend"),
        ("FROM x\nRUN <<EOF\nrm -rf /\nEOF\n", "line 2: RUN needs a container backend"),
        ("FROM x\nADD one.txt /x\n", "ADD needs a container backend"),
        ("ARG V=1\nFROM x:$V\n", "ARG needs a container backend"),
        ("FROM x\nFROM y\n", "several stages"),
        ("FROM x\nCOPY --from=y /a /b\n", "COPY --from=y needs a container backend"),
        ("FROM x\nCOPY --chmod=755 one.txt /b\n", "COPY --chmod=755 needs a container backend"),
        ("FROM x\nCOPY <<EOF /b\nhi\nEOF\n", "here-document"),
        ("FROM x\nCOPY absent /b\n", "environment/absent does not exist"),
        ("FROM x\nCOPY *.zip /b/\n", "matches nothing"),
        ("FROM x\nCOPY ../tests /b\n", "leaves the environment directory"),
        ("FROM x\nCOPY one.txt two.txt /b\n", "ends in '/'"),
        ("FROM x\nCOPY one.txt\n", "a source and a target"),
        ("FROM x\nWORKDIR $NOWHERE\n", "is not set by an ENV"),
        ("FROM x\nENV A='open\n", "No closing quotation"),
        ("FROM x\nCOPY one.txt \\\n", "ends inside the line continued at 2"),
        ("WORKDIR /x\n", "has no FROM"),
        ("FROM x\n%%\n", "is no instruction"),
    ],
)
def test_what_a_shared_system_cannot_do_is_refused(context: Path, dockerfile: str, words: str) -> None:
    with pytest.raises(TaskError) as raised:
        plan_environment(task_of(context, dockerfile))
    assert words in str(raised.value)


def test_an_image_needs_a_container_backend(context: Path) -> None:
    with pytest.raises(TaskError, match="needs a container backend"):
        plan_environment(task_of(context, None, image="debian:12"))


def test_a_dockerignore_needs_a_container_backend(context: Path) -> None:
    (context / ".dockerignore").write_text("x\n")
    with pytest.raises(TaskError, match="dockerignore"):
        plan_environment(task_of(context, "FROM x\n"))


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM x\n", None),
        ("FROM x\nWORKDIR /a\nWORKDIR b/../c\n", "/a/c"),
        ("FROM x\nENV PATH=$PATH:/x\nARG ROOT=/srv\nRUN echo \\\n  $HOME\nWORKDIR $ROOT/app\n", "/srv/app"),
        ("FROM x\nRUN cat <<EOF > f\nWORKDIR /no\nEOF\nWORKDIR /yes\n", "/yes"),
    ],
)
def test_the_working_directory_of_any_dockerfile(dockerfile: str, workdir: str | None) -> None:
    assert workdir_of(dockerfile) == workdir


def test_line_numbers_are_where_an_instruction_starts() -> None:
    assert [(item.line, item.name) for item in parse("FROM x\n\n# c\nRUN a \\\n  b\ncopy a b\n")] == [
        (1, "FROM"),
        (4, "RUN"),
        (6, "COPY"),
    ]
