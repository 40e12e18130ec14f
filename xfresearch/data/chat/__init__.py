"""Conversations as text, by the chat template beside a tokenizer; and as training data: data.objective.kind='chat'.

rendering.py runs a template in a confined process, templates.py asks it. chat_files.py reads rows of messages,
conversations.py says which part of a conversation's text is an answer, and chat_splits.py packs the tokens into rows.
"""
