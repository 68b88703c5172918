"""Checks that the `pipeline` settings do not contradict each other."""

from typing import TYPE_CHECKING

from storage.settings import StorageSettings
from telemetry.errors import InputError

if TYPE_CHECKING:
    from pipeline.run_settings import PipelineSettings


def check_pipeline(pipeline: "PipelineSettings", storage: StorageSettings) -> None:
    """Check the `pipeline` settings.

    Raises:
        InputError: names the settings, their values and the cure.
    """
    if pipeline.buffer_depth > storage.max_policy_lag:
        raise InputError(
            f"pipeline.buffer_depth {pipeline.buffer_depth} exceeds storage.max_policy_lag {storage.max_policy_lag}: "
            f"rows would be too old to train on; set buffer_depth to at most {storage.max_policy_lag}, "
            "or raise max_policy_lag"
        )
    if pipeline.dask_address and pipeline.task_runner != "dask":
        raise InputError(
            f"pipeline.dask_address '{pipeline.dask_address}' is for pipeline.task_runner 'dask', not "
            f"'{pipeline.task_runner}': set one of the two"
        )
