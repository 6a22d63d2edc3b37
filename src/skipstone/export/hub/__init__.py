"""What was made here, as repositories of the Hugging Face hub: what a folder or file is, its model card, one commit for all."""
