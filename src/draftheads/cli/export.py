"""``draftheads export``: a head for other engines."""

import json

from draftheads.cli.options.export import ExportOptions
from draftheads.export import export_head
from draftheads.models.model_names import base_of, model_id_of


def run(options: ExportOptions) -> None:
    """Exports, then prints how vLLM is told to use it."""
    folder = export_head(options.head, options.out, model=options.model)
    model_id = model_id_of(base_of(options.model))
    speculative = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 4})
    print(f"saved in {folder}; vllm serve {model_id} --speculative-config '{speculative}'")
