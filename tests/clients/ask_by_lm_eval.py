"""lm-eval's model `local-completions`: python ask_by_lm_eval.py URL MODEL TOKENIZER < requests.json prints the answers."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def main() -> None:
    url, name, tokenizer = sys.argv[1:]
    asked = json.load(sys.stdin)
    model = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model=name,
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        num_concurrent=2,
        max_retries=1,
        max_length=512,
    )
    found = {}
    for kind, requests in asked.items():
        instances = [
            Instance(request_type=kind, doc={}, arguments=tuple(one), idx=number) for number, one in enumerate(requests)
        ]
        found[kind] = getattr(model, kind)(instances)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
