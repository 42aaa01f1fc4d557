"""``draftheads merge``: one ordinary model folder, with its head in it."""

from draftheads.train.joint import HEAD_FOLDER
from draftheads.train.merge import MergeOptions, merge


def run(options: MergeOptions) -> None:
    """Merges, then says how to decode."""
    merge(options)
    print(f"saved in {options.out}; draftheads generate --model {options.out} --head {options.out / HEAD_FOLDER}")
