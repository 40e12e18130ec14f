"""What decides the numbers of a run besides its config and its data: source files, settings of JAX, flags of XLA, devices.

Source files have digests, because a commit does not identify uncommitted edits, and a copy without .git has no commit.
"""

import ast
import hashlib
import re
import shlex
import sys
import sysconfig
from importlib.util import resolve_name
from pathlib import Path

from xfresearch.runtime import xla_flags

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = (xla_flags.XLA, xla_flags.LIBTPU)  # environment variables that hold flags of XLA
# Words in the names of JAX's settings, and flags of XLA, that cannot change a number. All others count, also those that
# later versions add: a needless refusal costs a --fork, a change that nobody notices costs a result.
HARMLESS_WORDS = {
    *("cache", "caches", "log", "logging", "debug", "dump", "dumps", "explain", "pprint", "report", "warn", "source"),
    *("traceback", "tracebacks", "locations", "errors", "check", "checks", "checking", "guard"),
    *("platform", "platforms", "backend", "device", "devices", "mock", "topology", "distributed", "transfer", "transport"),
    *("timeout", "preemption", "recoverability", "share", "export", "serialization", "async"),
}
HARMLESS_FLAGS = re.compile(
    "xla_force_host_platform_device_count|xla_dump_.*|xla_hlo_profile|xla_gpu_cuda_data_dir|"
    "xla_cpu_parallel_codegen_split_count|xla_gpu_force_compilation_parallelism|.*_timeout_(ms|secs|seconds)"
)


def source_digest() -> str:
    """The SHA-256 of the names and contents of all Python files of this package. Its configs are left out: `config_files`
    has those that a run reads. It is the same in a checkout and in a wheel."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "configs")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def config_files(file: str) -> dict[str, str]:
    """{name: SHA-256} of `file`, a config file FILE[:arg] that has been read, and of the modules that it imports with a
    statement, directly or indirectly. Only modules of the user and configs of this package are listed, not those of Python,
    of installed packages or of the rest of this one."""
    path = Path(file.split(":")[0])
    files, waiting = {path.name: path.read_bytes()}, [(path.name, "")]
    while waiting:
        name, package = waiting.pop()
        for imported in _imported(files[name], package) - files.keys():
            module = sys.modules.get(imported)  # it may be a name in a module, too
            source = getattr(module, "__file__", None)
            if module is not None and source and _is_of_user(source):
                files[imported] = Path(source).read_bytes()
                waiting.append((imported, module.__package__ or ""))
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _imported(source: bytes, package: str) -> set[str]:
    """The modules that the import statements of a source file in `package` may name, with the packages that they are in."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            names |= {f"{base}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}


def _is_of_user(file: str | None) -> bool:
    path = Path(file or "").resolve()
    if path.is_relative_to((PACKAGE / "configs").resolve()):  # in a checkout a link
        return True
    installed = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = [PACKAGE, *(Path(each).resolve() for each in installed if each)]
    return path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in folders)


def jax_settings() -> dict[str, str]:
    """{name: value} of the settings of JAX that may decide numbers, as they are now: by code, by default or by JAX_*
    variables."""
    import jax

    return {name: str(value) for name, value in jax.config.values.items() if not HARMLESS_WORDS & {*name.split("_")}}


def compiler_flags() -> dict[str, str]:
    """{variable: its flags, sorted, that may decide numbers} of FLAGS. Of two values of one flag, the last one counts."""
    return {variable: _deciding(xla_flags.given(variable)) for variable in FLAGS}


def _deciding(text: str) -> str:
    if text and not text.lstrip().startswith("-") and Path(text).is_file():  # XLA reads flags from a file, too
        text = Path(text).read_text()
    flags = dict(flag.lstrip("-").partition("=")[::2] for flag in shlex.split(text))
    return " ".join(f"--{name}={flags[name] or 'true'}" for name in sorted(flags) if not HARMLESS_FLAGS.fullmatch(name))


def devices() -> str:
    """'8 x TPU v5', or '1 x cpu (AMD EPYC 9B14)'."""
    import jax

    from xfresearch.runtime.hardware import cpu_model, kinds_of

    kinds = kinds_of(jax.devices())
    return f"{kinds} ({cpu_model()})" if jax.default_backend() == "cpu" else kinds
