"""An OpenAI-compatible server.

A body (`api_schemas`) becomes requests (`request_parser`). They wait (`admission`) and run (`scheduler`) in one thread
(`model_thread`). Their tokens become text (`output_text`), and the text an answer (`completions_api`) over HTTP (`app`)."""
