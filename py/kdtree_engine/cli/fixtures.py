"""`kdtree fixtures`: looking into KDTR files."""

from __future__ import annotations

from pathlib import Path

import click

from .. import kdtr
from .._errors import KdtrError
from ._common import json_option, print_json, print_table, require_writable, resolve_fixture


@click.group()
def fixtures() -> None:
    """Show, verify and convert KDTR files. FILE is a path or the name of a bundled file (trace_code)."""


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
    rows = [(t.name, t.dtype, str(list(t.shape)), f"{t.nbytes:,}", f"{t.crc32:08x}") for t in content.tensors]
    print_table(("tensor", "dtype", "shape", "bytes", "crc32"), rows)
    for key, value in content.attrs.items():
        click.echo(f"{key} = {value}")


@fixtures.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option
def verify(files: tuple[str, ...], as_json: bool) -> None:
    """Check files whole: structure, checksums, values. Exit code 4 when one is missing or damaged."""
    results = []
    first_error: KdtrError | None = None
    for file in files:
        try:
            tensors, _ = kdtr.load(resolve_fixture(file))
            results.append({"file": file, "ok": True, "tensors": len(tensors)})
        except KdtrError as error:
            first_error = first_error or error
            results.append({"file": file, "ok": False, "status": int(error.status), "error": str(error)})
    if as_json:
        print_json({"files": results})
    else:
        for result in results:
            text = (
                f"ok, {result['tensors']} tensors"
                if result["ok"]
                else f"DAMAGED ({result['status']}): {result['error']}"
            )
            click.echo(f"{result['file']}: {text}")
    if first_error is not None:
        raise KdtrError(f"{sum(not r['ok'] for r in results)} of {len(results)} files failed", first_error.status)


@fixtures.command()
@click.argument("source", metavar="FILE")
@click.argument("destination", metavar="OUT", type=click.Path(path_type=Path))
def export(source: str, destination: Path) -> None:
    """Convert FILE to OUT; both formats by suffix: .kdtr, .npz, .safetensors."""
    require_writable("OUT", destination)
    kdtr.convert(resolve_fixture(source), destination)
    click.echo(f"wrote {destination}", err=True)
