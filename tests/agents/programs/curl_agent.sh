#!/bin/sh
# An agent of curl and sed in a session. The scenario is on standard input, the address in environment variables.
set -eu

send() {  # BODY: print the reply. A request that fails is sent again.
    curl --silent --show-error --fail --no-buffer --retry 2 "$OPENAI_BASE_URL/chat/completions" \
        --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" --data "$1"
}

answer() {  # QUESTION TOOL PARAMETER STREAM: print the answer
    tool='{"type": "function", "function": {"name": "'$2'", "parameters": {"type": "object", "properties": {"'$3'": {"type": "string"}}}}}'
    body='"model": "'$OPENAI_MODEL'", "tools": ['$tool'], "messages": [{"role": "user", "content": "'$1'"}'
    calls=$(send "{$body]}" | sed -n 's/.*"tool_calls": *\(\[{[^]]*}\]\).*/\1/p')
    id=$(printf '%s' "$calls" | sed 's/.*"id": *"\([^"]*\)".*/\1/')
    argument=$(printf '%s' "$calls" | sed 's/.*: *\\"\([^"]*\)\\".*/\1/')
    if [ "$2" = ask_expert ]; then
        result=$(answer "$argument" weather city false)
    else
        result=sunny
    fi
    body=$body', {"role": "assistant", "tool_calls": '$calls'}, {"role": "tool", "tool_call_id": "'$id'", "content": "'$result'"}]'
    send "{$body, \"stream\": $4}" | sed -n 's/.*"content": *"\([^"]*\)".*/\1/p' | tr -d '\n'
}

scenario=$(cat)
question=$(printf '%s' "$scenario" | sed 's/.*"question": "\([^"]*\)".*/\1/')
case $scenario in
*two_agents*) text=$(answer "$question" ask_expert question false) ;;
*stream*) text=$(answer "$question" weather city true) ;;
*) text=$(answer "$question" weather city false) ;;
esac
case $text in
*sunny*) echo '{"reward": 1.0}' ;;
*) echo '{"reward": 0.0}' ;;
esac
