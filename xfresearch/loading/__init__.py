"""What `xf.load` reads, and what it returns: a LanguageModel, with the edits that were made to it."""
