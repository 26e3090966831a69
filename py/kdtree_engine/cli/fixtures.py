"""`kdtree fixtures`: the test cases as KDTR files, and looking into such files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from .. import cases, kdtr
from .._errors import KdtError, KdtrError, Status
from .._library import source_root
from ._common import (
    json_option,
    print_json,
    print_table,
    printable,
    progress,
    require_writable,
    resolve_fixture,
)

NOTHING_MATCHED = 5

pattern_option = click.option("-k", "pattern", help="Only cases whose name contains this.")
folder_option = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="The fixtures' folder; default: build/fixtures of a checkout.",
)


@click.group()
def fixtures() -> None:
    """Make, list, show, verify and convert KDTR files.

    FILE is a path or the name of a bundled file (trace_code, mla_real).
    """


def selected(pattern: str | None) -> list[cases.Case]:
    found = cases.select(pattern)
    if not found:
        click.echo(f"kdtree: no case matches {pattern!r}", err=True)
        sys.exit(NOTHING_MATCHED)
    return found


def fixtures_folder(folder: Path | None) -> Path:
    if folder is not None:
        return folder
    root = source_root()
    if root is None:
        raise click.UsageError("--dir is needed: this is no checkout, so there is no build/fixtures")
    return root / "build" / "fixtures"


def write_index(folder: Path, written: list[cases.Case]) -> None:
    """The names of all cases, for tests that cannot read the table. Last, and whole or not at all.

    Fixtures that the old index names and the table no longer has are removed.
    """
    index, temporary = folder / "index.txt", folder / "index.txt.new"
    names = {case.name for case in written}
    try:
        if index.is_file():
            for name in set(index.read_text(encoding="utf-8").split()) - names:
                if re.fullmatch(r"\w+/\w+", name):
                    (folder / f"{name}.kdtr").unlink(missing_ok=True)
        temporary.write_text("".join(f"{case.name}\n" for case in written), encoding="utf-8")
        temporary.replace(index)
    except OSError as error:
        raise KdtError(f"cannot write {index}: {error}", Status.KDTR_IO) from error


@fixtures.command()
@pattern_option
@folder_option
@json_option
def gen(pattern: str | None, folder: Path | None, as_json: bool) -> None:
    """Write the table's cases with what the references say of them. The same bytes on every run."""
    chosen, target = selected(pattern), fixtures_folder(folder)
    written = []
    with progress(len(chosen), "generating") as bar:
        for case in chosen:
            arguments = case.arguments()
            tensors = {**cases.tensors_of("in", arguments), **cases.tensors_of("out", cases.expected(case))}
            path = target / f"{case.name}.kdtr"
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                kdtr.save(path, tensors, cases.attrs_of(case, arguments))
            except KdtrError as error:
                raise KdtError(str(error), error.status) from error  # the disk, not the fixture
            written.append(str(path))
            bar.update(1)
    if pattern is None:
        write_index(target, chosen)
    if as_json:
        print_json({"folder": str(target), "files": written})
    else:
        click.echo(f"{len(written)} fixtures in {target}")


@fixtures.command("list")
@pattern_option
@folder_option
@json_option
def list_cases(pattern: str | None, folder: Path | None, as_json: bool) -> None:
    """List the table's cases, and whether their fixtures are there."""
    target = fixtures_folder(folder) if folder is not None or source_root() is not None else None
    rows = [
        (case.name, target is not None and (target / f"{case.name}.kdtr").is_file(), case.bench)
        for case in selected(pattern)
    ]
    if as_json:
        keys = ("name", "present", "bench")
        print_json(
            {
                "folder": None if target is None else str(target),
                "cases": [dict(zip(keys, row, strict=True)) for row in rows],
            }
        )
        return
    words = [(name, "yes" if present else "no", "yes" if bench else "") for name, present, bench in rows]
    print_table(("case", "fixture", "bench"), words)


@fixtures.command()
@click.argument("file")
@json_option
def show(file: str, as_json: bool) -> None:
    """List the tensors and attributes of a file."""
    path = resolve_fixture(file)
    content = kdtr.inspect(path)
    if as_json:
        tensors = [{**entry._asdict(), "shape": list(entry.shape)} for entry in content.tensors]
        print_json({"file": str(path), "tensors": tensors, "attrs": content.attrs})
        return
    rows = [
        (printable(t.name), t.dtype, str(list(t.shape)), f"{t.nbytes:,}", f"{t.crc32:08x}") for t in content.tensors
    ]
    print_table(("tensor", "dtype", "shape", "bytes", "crc32"), rows)
    for key, value in content.attrs.items():
        click.echo(f"{printable(key)} = {printable(value)}")


def verify_one(file: str) -> dict[str, Any]:
    try:
        tensors, _ = kdtr.load(resolve_fixture(file))
    except KdtrError as error:
        return {"file": file, "ok": False, "status": int(error.status), "error": str(error)}
    return {"file": file, "ok": True, "tensors": len(tensors)}


@fixtures.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option
def verify(files: tuple[str, ...], as_json: bool) -> None:
    """Check files whole: structure, checksums, values. Exit code 4 when one is missing or damaged."""
    results = [verify_one(file) for file in files]
    bad = [result for result in results if not result["ok"]]
    if as_json:
        print_json({"files": results})
    else:
        for result in results:
            if result["ok"]:
                text = f"ok, {result['tensors']} tensors"
            else:
                word = "UNREADABLE" if result["status"] == Status.KDTR_IO else "DAMAGED"
                text = f"{word} ({result['status']}): {printable(result['error'])}"
            click.echo(f"{printable(result['file'])}: {text}")
    if bad:
        raise KdtrError(f"{len(bad)} of {len(results)} files failed", bad[0]["status"])


@fixtures.command()
@click.argument("source", metavar="FILE")
@click.argument("destination", metavar="OUT", type=click.Path(path_type=Path))
@json_option
def export(source: str, destination: Path, as_json: bool) -> None:
    """Convert FILE to OUT; both formats by suffix: .kdtr, .npz, .safetensors."""
    require_writable("OUT", destination)
    path = resolve_fixture(source)
    load, save = kdtr.loader_of(path), kdtr.saver_of(destination)
    tensors, attrs = load(path)
    try:
        save(destination, tensors, attrs)
    except KdtrError as error:
        if error.status == Status.KDTR_IO:
            raise KdtError(str(error), error.status) from error  # the disk, not the fixture
        raise
    if as_json:
        print_json({"source": str(path), "destination": str(destination), "tensors": len(tensors)})
    else:
        click.echo(f"wrote {destination}", err=True)
