"""Methods and what people use today, measured in one interleaved run: what is run, how, and what comes out (report/)."""
