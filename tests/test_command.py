"""The command lines: help without JAX, versions, completion, shipped configs, and typos that are answered at once."""

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cpu_time import cpu_seconds
from tests.test_config import MISTAKES
from xfresearch import __main__, __version__, bench, convert
from xfresearch.models.catalogue import TABLES
from xfresearch.options import shipped
from xfresearch.options.fields import every_option
from xfresearch.options.other_names import OTHER_NAMES
from xfresearch.run_config import known_keys
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import parse
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "xfresearch").glob("*.py"))
COMMANDS = sorted(path.stem for path in MODULES if "run(main)" in path.read_text() and path.stem != "__main__")


def ran(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, **options)


def test_importing_xfresearch_is_quick_and_does_not_load_jax():
    code = "import sys, time; t = time.process_time; a = t(); import xfresearch; print(t() - a, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, has_jax = done.stdout.split()
    assert float(seconds) < 0.3
    assert has_jax == "False"


@pytest.mark.parametrize("name", [*COMMANDS, "configs"])
def test_help_is_quick(name):
    before = cpu_seconds()
    done = ran(f"xfresearch.{name}", "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m xfresearch.{name} ")
    assert cpu_seconds() - before < 0.3


def examples_in_help(capsys) -> list[list[str]]:
    """The words of every example that a command, or an operation of `bench`, has in its --help."""
    lines = []
    for words in [*([name] for name in __main__.COMMANDS), *(["bench", name] for name in bench.OPERATIONS)]:
        with pytest.raises(SystemExit):
            __main__.main([*words, "--help"])
        shown = re.findall(r"^ +(?:\w+=\w+ )?python -m xfresearch\.(.*)$", capsys.readouterr().out, re.M)
        lines += [line for line in shown if "|" not in line.split('"')[0] and "[" not in line.split('"')[0]]
    return [shlex.split(line) for line in lines]


def test_examples_of_every_help_are_read_in_any_directory(capsys, monkeypatch, tmp_path):
    """Their flags exist, and their configs have names: an installed package has no folder configs/ beside it."""
    monkeypatch.chdir(tmp_path)
    examples = examples_in_help(capsys)
    assert {name for name, *_ in examples} > {*__main__.MODELS} and len(examples) > 40
    for name, *arguments in examples:
        conversion = name == "convert" and arguments[0].strip("-") not in ("import", "export", "list", "dry-run")
        rest = [] if conversion else __main__.module(name).parser().parse_known_args(arguments)[1]
        assert not conversion or convert.parse_surgery(arguments).steps
        assert all(each.startswith("--config.") for each in rest), (name, rest)
        configs = [value for flag, value in pairwise(arguments) if flag == "--config"]
        assert all(shipped.located(config) != config and shipped.require(config) for config in configs), (name, configs)


def test_the_package_lists_its_commands_without_jax():
    assert {*__main__.COMMANDS} == {*COMMANDS, "configs"}
    code = "import sys; from xfresearch.__main__ import main; main([]); print('jax' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()[2:-6]
    assert done.stderr == "False\n"
    assert [line.split()[2] for line in lines] == [f"xfresearch.{name}" for name in __main__.COMMANDS]
    assert "  python -m xfresearch.train       Trains a model, or resumes the run in the directory" in lines
    assert all(len(line) < 120 and "python" not in line[12:] for line in lines)


def test_one_command_is_all_commands(monkeypatch, capsys):
    """`xfresearch train` is `python -m xfresearch.train`, and the help has the form in which it was asked for."""
    for started, form in (("/bin/xfresearch", "xfresearch train"), ("train.py", "python -m xfresearch.train")):
        monkeypatch.setattr(sys, "argv", [started])
        with pytest.raises(SystemExit) as ended:
            __main__.main(["train", "--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and text.startswith(f"usage: {form} [-h] --config") and f"\n{form} --config" in text
    monkeypatch.setattr(sys, "argv", ["/bin/xfresearch"])
    assert command.as_typed("see python -m xfresearch --help") == "see xfresearch --help"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    __main__.main([])
    assert "  python -m xfresearch.evaluate " in capsys.readouterr().out
    with pytest.raises(UserError, match="^tain: there is no such command; did you mean 'train'[?]"):
        __main__.main(["tain", "--config", "gpt2"])
    with pytest.raises(UserError, match="^--verson: .* did you mean '--version'[?]"):
        __main__.main(["--verson"])


def test_version_names_ours_jax_and_the_devices(capsys):
    __main__.main(["--version"])
    ours, libraries, devices = capsys.readouterr().out.splitlines()
    assert ours.startswith(f"xfresearch {__version__}") and libraries.startswith("jax ") and "x cpu" in devices
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_has_every_command_flag_and_config(shell, capsys, tmp_path):
    __main__.main(["completion", shell])
    script = capsys.readouterr().out
    for name in __main__.COMMANDS:
        parser = __main__.module(name).parser()
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        assert name in script and all(flag in script for flag in flags), name
    assert all(name in script for name in shipped.shipped())
    if shell == "bash":
        (tmp_path / "script").write_text(script)
        line = "COMP_WORDS=(xfresearch train --config gp); COMP_CWORD=3; COMP_LINE='xfresearch train --config gp'; "
        ask = f"source {tmp_path}/script; {line}_shtab_xfresearch; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout.split() == ["gpt2", "gptj"], done.stderr


def test_configs_are_listed_shown_and_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    __main__.main(["configs"])
    listed = capsys.readouterr().out.splitlines()
    first, second = (listed[0].index(title) for title in ("args", "about"))
    assert all(line[first - 2 : first].isspace() and not line[second - 2 : second].strip() for line in listed)
    assert len([line for line in listed if line.startswith(" ")]) > 3  # the args of the playground need several lines
    lines = {line.split()[0]: line for line in listed if not line.startswith(" ")}
    assert "GPT-2 (Radford et al. 2019)" in lines["gpt2"] and "3m, 5m, tiny" in lines["gpt2"]
    assert lines.keys() == {"config", *shipped.shipped()} and all(line.split("  ")[-1] for line in lines.values())
    __main__.main(["configs", "show", "llama"])
    assert "llama:70b" in capsys.readouterr().out
    for option, table in TABLES.items():
        __main__.main(["configs", "show", option])
        shown = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in shown] == [*table]
        assert all(entry.formula in line and entry.paper in line for line, entry in zip(shown, table.values(), strict=True))
    with pytest.raises(UserError, match="^gtp2: there is no such config; did you mean 'gpt2'.* no option .*layout, norm, "):
        __main__.main(["configs", "show", "gtp2"])
    __main__.main(["configs", "copy", "gpt2", "."])
    assert "train --config gpt2.py:tiny" in capsys.readouterr().out
    text = Path("gpt2.py").read_text()
    Path("gpt2.py").write_text(text.replace("    return config", "    config.seed = 7\n    return config"))
    assert (parse(["--config", "gpt2.py:tiny"]).seed, parse(["--config", "gpt2:tiny"]).seed) == (7, 0)
    with pytest.raises(UserError, match="^gpt2.py already exists: name a new file, such as my_gpt2.py"):
        __main__.main(["configs", "copy", "gpt2", "."])
    __main__.main(["configs", "copy", "studies/w_o", "mine/own.py"])
    assert "study --config mine/own.py" in capsys.readouterr().out
    with pytest.raises(UserError, match="^gtp2: there is no such config; did you mean 'gpt2'"):
        __main__.main(["configs", "copy", "gtp2", "."])


@pytest.fixture
def keys_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XFRESEARCH_CACHE", str(tmp_path / "cache"))
    assert not known_keys.kept()
    known_keys.keep(Config())


def test_a_typo_is_answered_before_jax_is_imported(keys_are_kept):
    before = cpu_seconds()
    done = ran("xfresearch.train", "--config=gpt2:tiny", "--config.model.widht=64", cwd=ROOT)
    assert done.returncode == 2 and cpu_seconds() - before < 0.5
    assert done.stderr.startswith("error: config.model.widht=64: there is no key 'widht'; did you mean 'width'?")
    assert done.stderr.count("\n") == 1


def test_kept_keys_pass_what_a_config_has_and_refuse_the_typos_that_the_config_refuses(keys_are_kept):
    refused = 0
    for arguments, _ in MISTAKES:
        given = ["--config=gpt2:tiny", *arguments.split()]
        with pytest.raises(UserError) as whole:
            parse(given)
        try:
            known_keys.check(given)
        except UserError as error:
            refused += 1
            assert str(error).split(" (")[0] == str(whole.value).split(" (")[0]
    assert refused > 10
    known_keys.check(["--config=normless:tiny", "--config.model.blocks.first.dropout=0.1"])
    known_keys.check(["--config=gpt2:tiny", "--config.model.blocks.main.feed_forward.moe.top_k=1"])  # if kind=moe
    with pytest.raises(UserError, match="--config=gtp2: there is no such file; did you mean 'gpt2'"):
        known_keys.check(["--config=gtp2"])


def test_keys_of_other_sources_or_of_anything_else_are_not_used(keys_are_kept, monkeypatch):
    assert known_keys.kept()["model"]["width"] is None
    monkeypatch.setattr(known_keys, "source_digest", lambda: "another")
    assert not known_keys.kept()
    known_keys.keep(Config())
    assert known_keys.kept()
    for content in ("", "[]", "3", '{"source": "another"}', "\xff"):
        known_keys._file().write_bytes(content.encode("latin-1"))
        assert not known_keys.kept(), content


def test_names_of_other_codebases_are_answered_with_keys_that_exist():
    known = {each.path for each in every_option(Config())}
    for name, key in OTHER_NAMES.items():
        assert key in known
        assert not re.search(rf"\b{name}\b", key.split(".")[-1]), name
    for given in ("lr", "tp", "epochs", "batch"):
        for arguments in ([f"--{given}=1"], [f"--config.{given}=1"]):
            with pytest.raises(UserError, match=f"{given}.* did you mean '(--config.)?{OTHER_NAMES[given]}'[?]"):
                parse(["--config=gpt2:tiny", *arguments])


def test_plus_minus_means_one_thing_and_a_file_that_prints_it_says_so():
    for path in (ROOT / "xfresearch").rglob("*.py"):
        text = path.read_text()
        if re.search(r'"\+-"| \+- \{', text):
            assert "PLUS_MINUS" in text, path


def test_an_output_file_that_cannot_be_written_is_an_error_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    parser = command.Parser()
    parser.add_argument("--json")
    with pytest.raises(UserError, match="--json=.*cannot be written"):
        parser.parse_args(["--json", str(tmp_path / "file" / "out.json")])
    assert parser.parse_args(["--json", str(tmp_path / "new" / "out.json")]).json
    assert list((tmp_path / "new").iterdir()) == []


def test_workflows_call_make_targets_alone():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(files) > 1
    for file in files:
        steps = re.findall(r"^ +- run: (.*)$|^ +run: (.*)$", file.read_text(), re.M)
        assert steps, file
        for step in map("".join, steps):
            assert re.fullmatch(r"make ([\w-]+)( [A-Z]+=\w+)*", step), step
            assert step.split()[1] in targets, step
