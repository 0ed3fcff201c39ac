"""Reading Harbor task directories: what is understood, what is reported, what is refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from openforgerl.errors import TaskError
from openforgerl.tasks import lint, read_task, read_tasks
from openforgerl.tasks.harbor import strip_canary

MakeTask = Callable[..., Path]


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    def make(toml: str = 'schema_version = "1.4"\n', *, name: str = "sample", instruction: str = "Do it.\n") -> Path:
        root = tmp_path / name
        for relative, text in {
            "task.toml": toml,
            "instruction.md": instruction,
            "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /workspace\n",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
            "solution/solve.sh": "true\n",
        }.items():
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return make


def test_a_whole_task(make_task: MakeTask) -> None:
    task = read_task(
        make_task(
            """
schema_version = "1.4"
artifacts = ["/data/out.txt", { source = "/var/log/app", destination = "app" }]
[task]
name = "org/whole"
version = "2"
authors = [{ name = "A" }]
keywords = ["k"]
[metadata]
family = "copy"
seed = 7
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 30.5
reward_range = [-1, 1]
pass_threshold = 0.5
env = { MODE = "${MODE:-strict}", EMPTY = "${X:-}", PLAIN = "$5" }
[environment]
docker_image = "debian:12"
cpus = 2
memory_mb = 512
storage_mb = 1024
workdir = "/app"
env = { A = "b" }
build_timeout_sec = 10
""",
        )
    )
    assert task.name == "org/whole"
    assert task.instruction == "Do it."
    assert task.metadata == {"family": "copy", "seed": 7}
    assert (task.agent_timeout, task.verifier_timeout) == (60.0, 30.5)
    assert task.verifier_env == {"MODE": "strict", "EMPTY": "", "PLAIN": "$5"}
    assert task.artifacts == ("/data/out.txt", "/var/log/app")
    assert (task.reward_range, task.pass_threshold) == ((-1.0, 1.0), 0.5)
    environment = task.environment
    assert (environment.image, environment.workdir, environment.cpus) == ("debian:12", "/app", 2.0)
    assert (environment.memory_mb, environment.storage_mb, environment.env) == (512, 1024, {"A": "b"})


def test_defaults(make_task: MakeTask) -> None:
    root = make_task()
    task = read_task(root)
    assert (task.name, task.path) == ("sample", str(root))
    assert (task.agent_timeout, task.verifier_timeout) == (900.0, 600.0)  # the Task type's own
    assert (task.reward_range, task.pass_threshold) == ((0.0, 1.0), 1.0)
    assert task.environment.workdir == "/workspace"
    assert lint(root) == []


@pytest.mark.parametrize(
    ("toml", "attribute", "value"),
    [
        ('version = "1.0"\n[environment]\nmemory = "2G"\n', "memory_mb", 2048),
        ('version = "1.0"\n[environment]\nmemory = "512M"\n', "memory_mb", 512),
        ('version = "1.0"\n[environment]\nmemory = "4 GiB"\n', "memory_mb", 4096),
        ('version = "1.0"\n[environment]\nmemory = "1.5GB"\n', "memory_mb", 1536),
        ('version = "1.0"\n[environment]\nstorage = "10G"\n', "storage_mb", 10240),
        ('version = "1.0"\n[environment]\ncpu = 4\n', "cpus", 4.0),
    ],
)
def test_legacy_spellings_mean_the_same_and_are_reported(
    make_task: MakeTask, toml: str, attribute: str, value: float
) -> None:
    root = make_task(toml)
    assert getattr(read_task(root).environment, attribute) == value
    warnings = [finding for finding in lint(root) if "legacy spelling" in finding.message]
    assert len(warnings) == 2  # version, and the one above
    assert all(finding.level == "warning" for finding in warnings)


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_every_schema_version_reads_without_a_word(make_task: MakeTask, version: str) -> None:
    root = make_task(f'schema_version = "{version}"\n')
    assert read_task(root).name == "sample"
    assert lint(root) == []


@pytest.mark.parametrize(
    ("toml", "where", "words"),
    [
        ("", "schema_version", "is missing"),
        ('schema_version = "9"\n', "schema_version", "is not one of"),
        ('schema_version = "1.4"\n[agent]\ntimeout_secs = 5\n', "agent.timeout_secs", "did you mean timeout_sec?"),
        ('schema_version = "1.4"\n[environmnt]\n', "environmnt", "did you mean environment?"),
        ('schema_version = "1.4"\n[environment]\nzzz = 5\n', "environment.zzz", "is unknown and ignored"),
        ('schema_version = "1.4"\n[environment]\nallow_internet = true\n', "environment.network_mode", "no-network"),
        ('schema_version = "1.4"\n[agent]\nuser = "root"\n', "agent.user", "unprivileged"),
    ],
)
def test_oddities_are_warnings(make_task: MakeTask, toml: str, where: str, words: str) -> None:
    root = make_task(toml)
    read_task(root)
    (finding,) = lint(root)
    assert (finding.level, finding.where) == ("warning", where)
    assert words in finding.message


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agent]\ntimeout_sec = 0\n", "agent.timeout_sec: must be above 0"),
        ("[agent]\ntimeout_sec = inf\n", "agent.timeout_sec: must be a finite number"),
        ("[agent]\ntimeout_sec = true\n", "agent.timeout_sec: must be a finite number"),
        ('[agent]\ntimeout_sec = "60"\n', "agent.timeout_sec: must be a finite number"),
        ('[environment]\nmemory = "lots"\n', "environment.memory_mb: must be a size"),
        ("[environment]\nmemory_mb = 0\n", "environment.memory_mb: must be a size"),
        ('[environment]\nworkdir = "app"\n', "environment.workdir: must be an absolute path"),
        ('[environment]\nos = "windows"\n', "environment.os"),
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ('[[environment.mcp_servers]]\nname = "x"\n', "environment.mcp_servers"),
        ('[environment.env]\nKEY = "${OPENAI_API_KEY}"\n', "environment.env.KEY: ${OPENAI_API_KEY} needs a default"),
        ("[environment]\nenv = { A = 1 }\n", "environment.env.A: must be a string"),
        ('[verifier]\nenvironment_mode = "separate"\n', "verifier.environment_mode"),
        ("[verifier]\nreward_range = [1, 0]\n", "verifier.reward_range"),
        ("[verifier]\nreward_range = [0, inf]\n", "verifier.reward_range"),
        ("[verifier]\npass_threshold = 2\n", "verifier.pass_threshold"),
        ("[[steps]]\nname = 'a'\n", "steps: multi-step"),
        ('artifacts = ["out.txt"]\n', "artifacts[0]: must be an absolute path"),
        ('artifacts = ["/a/../../etc"]\n', "artifacts[0]"),
        ('[task]\nname = "../up"\n', "task.name"),
        ('[task]\nname = "a//b"\n', "task.name"),
        ("agent = 3\n", "agent: must be a table"),
        ("[agent\n", "is not TOML"),
    ],
)
def test_what_cannot_be_given_is_refused(make_task: MakeTask, toml: str, words: str) -> None:
    root = make_task(toml)
    with pytest.raises(TaskError) as raised:
        read_task(root)
    assert words in str(raised.value)
    assert lint(root)[0].level == "error"


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_missing_files_are_named(make_task: MakeTask, missing: str) -> None:
    root = make_task()
    (root / missing).unlink()
    with pytest.raises(TaskError, match=f"{missing}.*is missing"):
        read_task(root)


def test_an_image_needs_no_dockerfile_and_a_missing_solution_is_a_warning(make_task: MakeTask) -> None:
    root = make_task('schema_version = "1.4"\n[environment]\ndocker_image = "debian:12"\n')
    (root / "environment" / "Dockerfile").unlink()
    (root / "solution" / "solve.sh").unlink()
    assert read_task(root).environment.image == "debian:12"
    assert {finding.where for finding in lint(root)} == {"solution/solve.sh", "environment"}


def test_compose_is_refused(make_task: MakeTask) -> None:
    root = make_task()
    (root / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(TaskError, match="several containers"):
        read_task(root)


@pytest.mark.parametrize("instruction", ["", " \n\n", "<!-- harbor-canary GUID 1 -->\n\n"])
def test_an_empty_instruction_is_refused(make_task: MakeTask, instruction: str) -> None:
    with pytest.raises(TaskError, match=r"instruction\.md: is empty"):
        read_task(make_task(instruction=instruction))


def test_an_instruction_that_is_not_utf8_is_refused(make_task: MakeTask) -> None:
    root = make_task()
    (root / "instruction.md").write_bytes(b"caf\xe9\n")
    with pytest.raises(TaskError, match="not UTF-8"):
        read_task(root)


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("<!-- harbor-canary GUID 12 -->\n# terminal-bench-canary GUID 3\n\n\nDo it.\n", "Do it.\n"),
        ("Do it.\n# canary at the end stays\n", "Do it.\n# canary at the end stays\n"),
        ("# A heading\nDo it.\n", "# A heading\nDo it.\n"),
        ("\n\nDo it.\n", "\n\nDo it.\n"),
        ("Talk about a canary.\n", "Talk about a canary.\n"),
    ],
)
def test_canary_lines(text: str, stripped: str) -> None:
    assert strip_canary(text) == stripped


def test_the_digest_is_of_content_and_mode(make_task: MakeTask) -> None:
    root = make_task()
    first = read_task(root).digest
    lines = []
    for relative in sorted(
        ["environment/Dockerfile", "instruction.md", "solution/solve.sh", "task.toml", "tests/test.sh"]
    ):
        lines.append(f"{hashlib.sha256((root / relative).read_bytes()).hexdigest()} - {relative}\n")
    assert first == hashlib.sha256("".join(lines).encode()).hexdigest()
    os.utime(root / "task.toml", (1, 1))
    assert read_task(root).digest == first
    (root / "tests" / "test.sh").chmod(0o755)
    assert read_task(root).digest != first
    (root / "tests" / "test.sh").chmod(0o644)
    (root / "tests" / "extra").write_text("")
    assert read_task(root).digest != first


def test_links_and_special_files_are_refused(make_task: MakeTask) -> None:
    root = make_task(name="linked")
    (root / "environment" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="symbolic link"):
        read_task(root)
    other = make_task(name="piped")
    os.mkfifo(other / "environment" / "pipe")
    with pytest.raises(TaskError, match="no regular file"):
        read_task(other)


def test_oversize_is_refused(make_task: MakeTask) -> None:
    root = make_task()
    with (root / "environment" / "big").open("wb") as file:
        file.truncate(2**28 + 1)  # sparse: costs nothing
    with pytest.raises(TaskError, match="at most 268435456"):
        read_task(root)
    (root / "environment" / "big").unlink()
    (root / "instruction.md").write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(TaskError, match="at most 1048576"):
        read_task(root)


def test_many_tasks_at_any_depth(make_task: MakeTask, tmp_path: Path) -> None:
    for name in ("b", "sub/a", "sub/deep/c"):
        make_task(name=name)
    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b", "c"]
    assert [task.name for task in read_tasks(tmp_path / "b")] == ["b"]


def test_two_tasks_of_one_name_are_refused(make_task: MakeTask, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_task('schema_version = "1.4"\n[task]\nname = "same"\n', name=name)
    with pytest.raises(TaskError, match="both named 'same'"):
        read_tasks(tmp_path)


def test_no_task_and_half_a_task_are_refused(make_task: MakeTask, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no task"):
        read_tasks(tmp_path)
    with pytest.raises(TaskError, match="not a directory"):
        read_tasks(tmp_path / "absent")
    (make_task() / "task.toml").unlink()
    with pytest.raises(TaskError, match=r"instruction\.md but no task\.toml"):
        read_tasks(tmp_path)
