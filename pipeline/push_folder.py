"""Pushes an exported folder to the Hugging Face hub, as a private repository that its owner may open."""

from pathlib import Path

from telemetry.errors import EntenteError, InputError


def check_push(repository: str) -> None:
    """Check before any work that `repository` may be pushed to.

    Raises:
        InputError: the name is none, or this machine has no token of the hub.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(f"--push '{repository}' is no name of a repository: give it as 'owner/name'") from error
    if "/" not in repository:
        raise InputError(f"--push '{repository}' names no owner: give it as 'owner/name'")
    if not get_token():
        raise InputError("--push needs a token of the hub with the right to write: `hf auth login`, or the variable HF_TOKEN")


def push_folder(folder: Path, repository: str) -> str:
    """Push all files of the folder; returns the address of the repository.

    Raises:
        EntenteError: the hub refused it or did not answer. The folder stays.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Entente: {folder.name}")
    except Exception as error:
        # The hub client raises many unrelated types; all mean the same to the user.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EntenteError(f"'{folder}' is written, but the hub did not take it: {reason}") from error
    return f"https://huggingface.co/{repository}"
