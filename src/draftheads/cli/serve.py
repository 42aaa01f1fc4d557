"""``draftheads serve``: takes the port first, because the imports of :mod:`draftheads.cli.serving` take seconds."""

from draftheads.cli.main import import_quickly
from draftheads.serve.options import ServeOptions, listen


def run(options: ServeOptions) -> None:
    with listen(options.host, options.port) as listening:
        import_quickly("serving").run(options, listening)
