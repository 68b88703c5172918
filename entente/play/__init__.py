"""The policy outside of training: a board in the browser, seats on servers of others, and orders over the OpenAI API."""
