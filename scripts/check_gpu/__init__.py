"""What can be known about a run on a GPU without one: `make check-gpu`, and the lock for machines with a card.

    python -m scripts.check_gpu            compares this code with the CUDA wheels of vLLM, as text; runs vLLM's sampling kernels
    python -m scripts.check_gpu.lock       renews requirements/gpu.lock

Nothing here needs a card, and nothing here measures one.
"""
