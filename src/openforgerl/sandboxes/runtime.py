"""Our init with a Python of its own, as one directory that runs in any image of this machine's architecture.

An image need not have Python, nor this machine's C library: the directory holds the interpreter, the few modules that
init imports, every shared library that they need and the loader that starts them. It is mounted or copied to
`spec.INIT_HOME`, read-only, and `command` starts it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from openforgerl.errors import InputError
from openforgerl.sandboxes.bubblewrap import system_python
from openforgerl.sandboxes.spec import INIT_HOME

_PYTHON = "python/bin/python3"
_START = f"import sys; sys.path.insert(0, '{INIT_HOME}'); from inside.init import main; main()"
_LIST = """
import codecs, json, sys
sys.path.insert(0, sys.argv[1])
import inside.init
for name in ("ascii", "latin-1", "utf-8"):
    codecs.lookup(name)
done = {"version": "%d.%d" % sys.version_info[:2], "modules": {}, "libraries": [], "program": sys.executable}
library = [path for path in sys.path if path.endswith("python" + done["version"])][0] + "/"
for name, module in sorted(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if file is None or name == "__main__":
        continue
    if file.endswith(".so"):
        done["libraries"].append(file)
    elif name.split(".")[0] == "inside":
        done["modules"]["../../../" + name.replace(".", "/") + ("/__init__" if name == "inside" else "")] = file
    elif file.startswith(library):
        done["modules"][file[len(library):].removesuffix(".py")] = file
json.dump(done, sys.stdout)
"""
_COMPILE = """
import base64, importlib.util, json, marshal, sys
done = {}
for name, path in json.load(sys.stdin).items():
    code = marshal.dumps(compile(open(path, encoding="utf-8").read(), name, "exec"))
    done[name] = base64.b64encode(importlib.util.MAGIC_NUMBER + bytes(12) + code).decode()
json.dump(done, sys.stdout)
"""


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """The directory, and its content's digest."""

    path: Path
    digest: str


def command(*words: str) -> list[str]:
    """What starts init inside; `words` as `inside/init.py` says."""
    loader = [f"{INIT_HOME}/ld", "--inhibit-cache", "--library-path", f"{INIT_HOME}/lib"]
    return [*loader, f"{INIT_HOME}/{_PYTHON}", "-I", "-S", "-X", "utf8", "-c", _START, *words]


def cache_directory() -> Path:
    """$OPENFORGERL_CACHE, else ~/.cache/openforgerl."""
    named = os.environ.get("OPENFORGERL_CACHE")
    return Path(named).absolute() if named else Path.home() / ".cache" / "openforgerl"


def build_runtime(cache: Path) -> Runtime:
    """Make it once for this Python, this C library and this init, below `cache`. Blocking, about a second.

    Raises InputError where this machine has no Python to take, or no dynamic loader.
    """
    python = system_python()
    listed = json.loads(_run([str(python), "-I", "-S", "-c", _LIST, str(Path(__file__).parent)]))
    program = Path(os.path.realpath(listed["program"]))
    binaries = [program, *(Path(path) for path in listed["libraries"])]
    loader, shared = _needed(binaries)
    modules: dict[str, str] = listed["modules"]
    digest = hashlib.sha256(json.dumps([sorted(modules), listed["version"], _START]).encode())
    for path in sorted({loader, *binaries, *shared.values(), *(Path(path) for path in modules.values())}):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    target = cache / "runtimes" / digest.hexdigest()[:32]
    runtime = Runtime(path=target, digest="sha256:" + digest.hexdigest())
    if target.is_dir():
        return runtime
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        _fill(building, python, listed, loader, shared)
        os.rename(building, target)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return runtime


def _fill(building: Path, python: Path, listed: dict[str, object], loader: Path, shared: dict[str, Path]) -> None:
    building.chmod(0o755)
    program, version = str(listed["program"]), str(listed["version"])
    library = building / "python/lib" / f"python{version}"
    compiled = json.loads(_run([str(python), "-I", "-S", "-c", _COMPILE], json.dumps(listed["modules"])))
    copies = {building / "ld": loader, building / _PYTHON: Path(os.path.realpath(program))}
    copies |= {building / "lib" / name: path for name, path in shared.items()}
    extensions = msgspec.convert(listed["libraries"], list[str])
    copies |= {library / "lib-dynload" / Path(path).name: Path(path) for path in extensions}
    (library / "lib-dynload").mkdir(parents=True)  # Python looks for it, and for os.py, to know where it lives
    for target, source in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755)
    for name, code in compiled.items():
        target = Path(os.path.normpath(library / f"{name}.pyc"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(code))
    for folder, _, _ in os.walk(building):
        Path(folder).chmod(0o755)


def _needed(binaries: list[Path]) -> tuple[Path, dict[str, Path]]:
    """(the loader, name → file of each shared library) of programs and extensions, as the loader finds them."""
    loader: Path | None = None
    shared: dict[str, Path] = {}
    for binary in binaries:
        for line in _run(["ldd", str(binary)]).splitlines():
            found = re.match(r"\s*(\S+) => (/\S+) \(0x|\s*(/\S+) \(0x", line)
            if found is None:
                continue
            if found[3] is not None:
                loader = Path(found[3])
            else:
                shared[found[1]] = Path(found[2])
    if loader is None:
        raise InputError(f"{binaries[0]} is no dynamic program: install the system's own Python 3")
    return loader, shared


def _run(words: list[str], text: str = "") -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise InputError(f"{' '.join(words[:2])} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
