"""How good the text is: a judge's verdict for every runtime and precision."""
