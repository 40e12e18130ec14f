"""python -m xfresearch.convert import FOLDER WORKDIR
python -m xfresearch.convert export WORKDIR FOLDER
python -m xfresearch.convert NAME[,NAME...] WORKDIR NEW_WORKDIR
python -m xfresearch.convert --list
python -m xfresearch.convert --dry-run WORKDIR

Converts a model into another variant, exactly, or a Hugging Face folder and back. NAME is a conversion, or a chain of them:
the result computes the same function, with a certificate, or the conversion is refused (docs/surgery.md). --list shows the
conversions and their conditions; --dry-run, which of them apply to a model, and why the others do not.

import and export convert a Hugging Face folder, which has config.json, safetensors and a tokenizer, to a run's directory,
and back. evaluate, generate and xf.load read both. docs/interop.md lists what is exact and what is not supported.
"""

import re
import time
from argparse import ArgumentTypeError
from pathlib import Path

from xfresearch.evaluation import held_out
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError, require_new
from xfresearch.runtime.files import files_in, write_json

EPILOG = """\
examples:
  python -m xfresearch.convert import models/pythia-70m runs/pythia --dtype float32
  python -m xfresearch.convert export runs/pythia models/copy
  python -m xfresearch.convert export runs/a models/a --family llama --dtype bfloat16 --shard-size 500MB
  python -m xfresearch.convert fold_norm,merge_query_key runs/a runs/merged
  python -m xfresearch.convert merge_query_key runs/a --dry-run"""

# Parts of a model with an encoder that may be converted alone.
PARTS = {"--stack encoder": {"stack": "encoder"}, "--stack decoder": {"stack": "decoder"}, "--role cross": {"role": "cross"}}
UNITS = {"": 1, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] not in ("import", "export") and not arguments[0].startswith("-"):
        options = parse_surgery(arguments)
    else:
        options = parse(arguments)
    options.convert(options)


def parser() -> command.Parser:
    """The flags of the command."""
    made = command.Parser(prog="python -m xfresearch.convert", description=__doc__, epilog=EPILOG)
    made.add_argument(
        "--list", action="store_const", dest="convert", const=list_conversions, help="show all conversions"
    )
    made.add_argument("--dry-run", dest="workdir", metavar="WORKDIR", help="show which conversions apply to a model")
    conversions = made.add_subparsers(metavar="import|export|NAME")

    import_parser = conversions.add_parser("import", description=import_folder.__doc__)
    import_parser.add_argument("folder", metavar="FOLDER", help="a Hugging Face folder")
    import_parser.add_argument("workdir", metavar="WORKDIR", help="a new directory")
    dtypes = ("float32", "bfloat16", "float64")
    import_parser.add_argument(
        "--dtype", default="", choices=dtypes, help="dtype of computation (default: that of the files)"
    )
    allow = "go on with weights that are NaN or infinite (default: an error)"
    import_parser.add_argument("--allow-nonfinite", action="store_true", help=allow)
    import_parser.set_defaults(convert=import_folder)

    export_parser = conversions.add_parser("export", description=export_folder.__doc__)
    export_parser.add_argument("workdir", metavar="WORKDIR", help="a run's directory, or one of its checkpoints")
    export_parser.add_argument("folder", metavar="FOLDER", help="a new directory")
    add = export_parser.add_argument
    add("--family", default="", metavar="F", help="model_type to write (default: as imported, or the first that fits)")
    add(
        "--dtype",
        default="",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="dtype of the files (default: as imported, or that of the parameters)",
    )
    add("--step", type=held_out.at_least(0), metavar="N", help="checkpoint to export (default: the newest good one)")
    add("--shard-size", type=size, default="5GB", metavar="SIZE", help="largest size of a file (default: 5GB)")
    export_parser.set_defaults(convert=export_folder)
    return made


def parse(arguments: list[str]):
    options = parser().parse_args(arguments)
    if options.convert is None:
        options.convert = dry_run_all
        if options.workdir is None:
            parser().error("one of import|export|NAME is missing")
    return options


def parse_surgery(arguments: list[str]):
    """The arguments of NAME WORKDIR NEW_WORKDIR. The options of the conversions are added to the parser's."""
    from xfresearch.surgery import chain

    names = arguments[0]
    steps = chain(names)
    about = "\n".join(str(step.conversion) for step in steps)
    parser = command.Parser(prog=f"python -m xfresearch.convert {names}", description=about)
    parser.add_argument("workdir", metavar="WORKDIR", help="a run's directory, a checkpoint, or a Hugging Face folder")
    parser.add_argument("new", metavar="NEW_WORKDIR", nargs="?", help="a new directory")
    add = parser.add_argument
    add("--layers", metavar="N,N", type=layer_numbers, help="numbers of the layers to convert (default: all)")
    stacks = "of a model with an encoder: the stack to convert (default: both; with --layers the decoder)"
    add("--stack", choices=("encoder", "decoder"), default="", help=stacks)
    if roles := sorted({role for step in steps for role in step.conversion.roles}):
        add("--role", choices=roles, default="", help="role of the sublayers to convert (default: all)")
    add("--step", type=held_out.at_least(0), metavar="N", help="step of the checkpoint (default: the newest good one)")
    add("--dry-run", action="store_true", help="only say whether the conversion applies")
    add("--json", metavar="FILE", help="also write the certificate as JSON")
    own = {key: option for step in steps for key, option in step.conversion.options.items()}
    for key, option in own.items():
        kind = type(option.default)
        allowed = option.allowed or None
        add(
            f"--{key.replace('_', '-')}", type=kind, choices=allowed, help=f"{option.doc} (default: {option.default!r})"
        )
    options = parser.parse_args(arguments[1:])
    given = {key: getattr(options, key) for key in own if getattr(options, key) is not None}
    options.steps = chain(names, options.layers, given, options.stack, getattr(options, "role", ""))
    options.convert = dry_run if options.dry_run else operate
    if not options.dry_run and not options.new:
        parser.error("NEW_WORKDIR is missing")
    for name in ("new", "json"):
        if options.dry_run and getattr(options, name):
            raise UserError(f"{getattr(options, name)} is not allowed with --dry-run, which writes nothing")
    return options


def layer_numbers(text: str) -> tuple[int, ...]:
    """(0, 2) of '0,2'."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ArgumentTypeError(f"{text} is not allowed: it must be numbers of layers such as 0,2")
    return tuple(map(int, text.split(",")))


def list_conversions(options) -> None:
    """Prints every conversion with its conditions."""
    from xfresearch.surgery import CONVERSIONS

    for conversion in CONVERSIONS.values():
        print(conversion)


def dry_run(options) -> None:
    """Says whether the conversion applies to a checkpoint, and what the result is."""
    from xfresearch.loading import loading
    from xfresearch.surgery.converting import plan

    print(plan(loading.load(options.workdir, options.step), options.steps))


def dry_run_all(options) -> None:
    """Says for every conversion whether it applies to a checkpoint, or the reason why it does not."""
    from xfresearch.loading import loading
    from xfresearch.surgery import CONVERSIONS

    lm = loading.load(options.workdir)
    for name in CONVERSIONS:
        refused = refusal(lm, name)
        parts = PARTS.items() if refused and lm.config.encoder else ()
        alone = [flag for flag, where in parts if not refusal(lm, name, **where)]
        applies = f"applies with {' or '.join(alone)}; to all " if alone else ""
        print(f"{name:<26}{applies}refused: {refused}" if refused else f"{name:<26}applies")


def refusal(lm, name: str, stack: str = "", role: str = "") -> str:
    """Why a conversion does not apply to a model, or to a part of it; '' if it does."""
    from xfresearch.surgery import chain
    from xfresearch.surgery.converting import plan

    try:
        plan(lm, chain(name, stack=stack, role=role))
    except UserError as error:  # refused, or the conversion has no roles
        return str(error).removeprefix(f"{name}: ")
    return ""


def operate(options) -> None:
    """Converts a model to another variant, and writes the certificate beside it."""
    require_new(options.new, "convert")
    from xfresearch.loading import loading
    from xfresearch.surgery import convert

    lm, certificate = convert(loading.load(options.workdir, options.step), options.steps)
    lm.save(options.new)
    for path in (path_of(options.new) / "certificate.json", *filter(None, [options.json])):
        write_json(path, certificate.as_dict())
    print(f"{certificate}\n{options.new}: {lm!r}")


def path_of(text: str):
    """The epath.Path of an argument, which may be in a bucket."""
    from etils import epath

    return epath.Path(text).expanduser()


def size(text: str) -> int:
    """The number of bytes in '500MB' or '5GB'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|MB|GB)", text)
    if not match or not (count := int(float(match[1]) * UNITS[match[2]])):
        raise ArgumentTypeError(f"{text} is not allowed: it must be a size like 500MB or 5GB")
    return count


def import_folder(options) -> None:
    """Imports a Hugging Face folder as a directory that evaluate, generate and xf.load read."""
    require_new(options.workdir, "import")
    from xfresearch.interop import llama2c
    from xfresearch.interop.folder import is_folder, stored_tensors
    from xfresearch.loading import loading

    folder, _ = loading.locate(options.folder)
    if not is_folder(folder):
        what = "a run's directory"
        if not folder.is_dir():
            llama2c.read_layout(Path(folder))  # raises an error that says what any other .bin file is
            what = "a llama2.c model, which evaluate, generate and xf.load read as it is"
        raise UserError(f"{folder} is {what}: it must be a Hugging Face folder")
    begin = time.perf_counter()
    lm = loading.load(folder, dtype=options.dtype, allow_nonfinite=options.allow_nonfinite)
    seconds = time.perf_counter() - begin
    lm.save(options.workdir)
    assert lm.source, "a folder has a config.json"
    read = sum(tensor.bytes for tensor in stored_tensors(folder).values())
    print(f"{options.workdir}: {summary(lm.source.config['model_type'], lm, read, seconds)}")


def export_folder(options) -> None:
    """Exports the model of a run as a Hugging Face folder."""
    require_new(options.folder, "export")
    from xfresearch.loading import loading

    lm = loading.load(options.workdir, options.step)
    begin = time.perf_counter()
    family = lm.export_hf(options.folder, options.family, options.dtype, options.shard_size)
    seconds = time.perf_counter() - begin
    written = sum(file.stat().length for file in files_in(path_of(options.folder), pattern="*.safetensors"))
    print(f"{options.folder}: {summary(family, lm, written, seconds)}")


def summary(family: str, lm, size: int, seconds: float) -> str:
    """The result in one line: family, parameters, bytes and speed."""
    import jax

    count = sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    return f"{family}, {count:,} parameters, {size / 1e9:.2f} GB in {seconds:.1f} s ({size / seconds / 1e6:.0f} MB/s)"


if __name__ == "__main__":
    command.run(main)
