"""Makes the model, or finds the given one; its tokenizer and legal tables are tried on real prompts."""

from inference.memory_plan import size_text
from smoke.engines import make_requests
from smoke.job import Found, Job
from smoke.models import model_folder, shape_of


def run(job: Job) -> Found:
    """The model exists afterwards, and can be asked."""
    model = model_folder(job)
    shape = shape_of(model)
    requests = make_requests(model, 32, "try")
    prompt = sum(len(request.prompt_ids) for request in requests) / len(requests)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    whence = "given" if job.model else f"made: {job.shape}" + ("" if job.shape == "tiny" else ", random weights")
    return Found(
        sentence=f"{whence}; {size_text(size)}, {shape.layers} layers, prompts of {prompt:.0f} tokens",
        figures={"weights_bytes": size, "layers": shape.layers, "hidden": shape.hidden, "prompt_tokens": prompt},
    )
