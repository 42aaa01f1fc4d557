"""``draftheads push``: a head to the Hugging Face Hub."""

from draftheads.cli.options import PushOptions
from draftheads.interop.hub import push_head, write_repository


def run(options: PushOptions) -> None:
    """Uploads or writes, then prints how it is used."""
    if options.to_folder is None:
        place = push_head(options.head, options.repo, model=options.model, private=options.private)
        print(f"uploaded to {place}")
        source = options.repo
    else:
        folder = write_repository(options.head, options.to_folder, repository=options.repo, model=options.model)
        print(f"saved in {folder}; nothing was uploaded")
        source = str(folder)
    print(f'model.generate(**inputs, custom_generate="{source}", trust_remote_code=True)')
