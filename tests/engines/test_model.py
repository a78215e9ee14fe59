"""The converted model is a model: it loads without a hub and continues a sentence sensibly."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def test_greedy_continuation(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0])
