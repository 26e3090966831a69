"""`kdtree info`: what is installed here, and what it runs on."""

from __future__ import annotations

import platform
from typing import Any

import click
import numpy as np

from .. import __version__
from .._context import backends, build_info, default_context
from ._common import json_option, print_json


def environment() -> dict[str, Any]:
    """Versions, library, backends and threads of this process."""
    return {
        "version": __version__,
        "library": build_info(),
        "backends": backends(),
        "cpu_threads": default_context().num_threads,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


@click.command()
@json_option
def info(as_json: bool) -> None:
    """Show versions, the library, its build, and the backends of this machine."""
    facts = environment()
    if as_json:
        print_json(facts)
        return
    library = facts["library"]
    click.echo(
        f"kdtree-engine  {facts['version']}, Python {facts['python']}, numpy {facts['numpy']}, {facts['platform']}"
    )
    click.echo(f"library        {library['library']}")
    click.echo(
        f"build          {library['version']}, ABI {library['abi']}, {library['compiler']}, {library['build_type']}"
    )
    click.echo(f"CUDA code      {library['cuda_architectures'] or 'none'}")
    for name, backend in facts["backends"].items():
        if not backend["available"]:
            click.echo(f"{name:<14} not available: {backend['reason']}")
        for index, device in enumerate(backend.get("devices", [])):
            text = f"{name + (f':{index}' if name != 'cpu' else ''):<14} {device['name']}"
            if name == "cpu":
                text += f", {facts['cpu_threads']} threads"
            else:
                text += (
                    f", compute capability {device['compute_capability'] / 10:.1f} running sm_"
                    f"{device['kernel_architecture']} code, {device['multiprocessors']} SMs, "
                    f"{device['memory_bytes'] / 2**30:.0f} GiB"
                )
            click.echo(text)
