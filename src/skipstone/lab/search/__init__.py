"""Layer sets for a model, found before they are used."""
