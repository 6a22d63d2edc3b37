"""Texts for a whole file of requests, without a server: `lines` in, answers (`answering`), a `journal` that a killed run goes
on from, an ordered file out (`batch`), in one process or on Ray (`cluster`)."""
