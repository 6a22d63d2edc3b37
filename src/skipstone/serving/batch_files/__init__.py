"""Texts for a whole file of requests, without a server.

`request_lines` reads the input, `answer_line` answers one request, `journal` keeps answers so that a killed run goes on,
`batch` runs in this process and `ray_batch` on Ray."""
