"""``draftheads export``: a head for other engines."""

import json

from draftheads.cli.options.export import ExportOptions
from draftheads.export import export_head
from draftheads.head_files import read_head_files
from draftheads.zoo.registry import find_head


def run(options: ExportOptions) -> None:
    """Exports, then prints how vLLM is told to use it."""
    folder = export_head(options.head, options.out, model=options.model)
    model_id = read_head_files(find_head(options.head, options.model)).model_id
    speculative = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 4})
    print(f"saved in {folder}; vllm serve {model_id} --speculative-config '{speculative}'")
