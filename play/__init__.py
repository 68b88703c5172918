"""The policy outside of training: a board in the browser, and orders for other programs over the OpenAI API."""
