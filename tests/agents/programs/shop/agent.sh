#!/bin/sh
# The agent of examples/node_agent, with curl and jq. The task is on standard input, the answer is the output.
set -eu

task=$(cat)
messages=$(printf '%s' "$task" | jq -c '[
  {role: "system", content: "You answer questions about a shop. Use the tools."}, {role: "user", content: .question}]')
tools=$(jq -cn '
  {properties: {item: {type: "string"}}, required: ["item"], type: "object"} as $parameters
  | [["price", "Return the price of an item."], ["stock", "Return how much of an item is left."]]
  | map({type: "function", function: {name: .[0], description: .[1], parameters: $parameters}})')

for turn in 1 2 3; do
    body=$(jq -cn --argjson messages "$messages" --argjson tools "$tools" --arg model "$OPENAI_MODEL" \
        '{$model, $messages, $tools, max_completion_tokens: 40}')
    message=$(curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" --data "$body" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" |
        jq -c '.choices[0].message')
    if [ "$(printf '%s' "$message" | jq '.tool_calls | length')" = 0 ]; then
        printf '%s' "$message" | jq -r '.content'
        break
    fi
    messages=$(printf '%s' "$task" | jq -c --argjson messages "$messages" --argjson message "$message" '
      .shop as $shop
      | $messages + [$message] + [$message.tool_calls[] | .function.name as $tool
        | (.function.arguments | fromjson | .item) as $item
        | {role: "tool", tool_call_id: .id, content: ((try $shop[$item][$tool] catch null) // "There is no \($item).")}]')
done
