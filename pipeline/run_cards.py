"""The cards of a run: which the engine takes and which the trainer, checked before anything heavy starts."""

from inference.engine_cards import computes_on_card, has_cuda, usable_cards
from pipeline.run_settings import RunSettings
from telemetry.cards import CardPlan, check_cards, plan_cards, torch_cuda
from telemetry.errors import InputError


def run_cards(settings: RunSettings, *, trains: bool = True) -> CardPlan:
    """The cards that engine and trainer of this run take on this machine; none on a CPU.

    Args:
        trains: there is a trainer.

    Raises:
        InputError: `training.device` or another setting asks for a card that is not there, or a card cannot be used as planned.
    """
    inference, training = settings.inference, settings.training
    draws = computes_on_card(inference) and not settings.simulated.from_run
    trains_on_card = trains and training.device != "cpu" and torch_cuda() is not None
    cards = usable_cards(inference, on_card=draws or trains_on_card)
    if trains and training.device == "cuda" and not has_cuda():
        raise InputError("training.device is 'cuda' but torch has no GPU here: set training.device to 'auto' or 'cpu'")
    if trains and training.card >= 0 and not (cards and trains_on_card):
        raise InputError(
            f"training.card {training.card} names a GPU, but the trainer computes on the CPU here: remove it, or install the "
            "build for CUDA (`make setup` on a machine with a card)"
        )
    plan = plan_cards(
        cards,
        engine=inference.cards if draws else None,
        tensor_parallel=inference.tensor_parallel,
        trainer=training.card if training.card >= 0 else None,
        processes=training.processes if trains_on_card else 0,
    )
    check_cards(plan, cuda=torch_cuda())
    return plan
