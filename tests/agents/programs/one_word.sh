#!/bin/sh
# Ask the model for one word, with curl. The prompt is on standard input, the address in environment variables.
set -eu

curl --silent --show-error --fail "$OPENAI_BASE_URL/chat/completions" \
    --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" --data '{
  "model": "'"$OPENAI_MODEL"'",
  "messages": [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "'"$(cat)"'"}],
  "max_completion_tokens": 5
}'
