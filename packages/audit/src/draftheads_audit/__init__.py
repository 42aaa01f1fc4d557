"""Is a server's speculative decoding lossless? The same prompts with drafting and without, compared text by text."""

from draftheads.cli.main import Command

COMMAND = Command(
    "check whether a server's speculative decoding is lossless",
    "draftheads_audit.options",
    error_code=2,
    module="draftheads_audit.command",
)
