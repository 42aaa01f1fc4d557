"""Reads facts from a sentence into JSON of a schema, with and without a draft head.

python examples/structured.py --model smollm2-135m --head hydra
"""

import json

import tyro

import draftheads
from draftheads import Grammar, SamplingSettings

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", "unknown"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
PROMPT = "Extract the facts as JSON: Ada Moreno is 41 years old and smiles a lot."


def main(model: str = "smollm2-135m", head: str = "hydra") -> None:
    plain = draftheads.load(model, precision="fp32")
    engine = draftheads.load(model, head=head, precision="fp32")
    settings = SamplingSettings(grammar=Grammar.json_schema(SCHEMA), max_new_tokens=128)
    (result,) = engine.generate([PROMPT], settings)
    (expected,) = plain.generate([PROMPT], settings)
    print(json.loads(result.text))
    print(f"{result.tokens_per_step:.2f} tokens per step, the same text: {result.text == expected.text}")
    (choice,) = engine.generate(["Is water wet?"], grammar=Grammar.regex("(yes|no)"))
    print(choice.text)


if __name__ == "__main__":
    tyro.cli(main)
