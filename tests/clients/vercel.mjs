// The Vercel AI SDK against a gateway: `node vercel.mjs API TASK...`.
// Prints one JSON object with the SDK's result of each task.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false; // they go to standard output
const headers = { 'x-inferry-run-id': `vercel-${process.argv[2]}` };
const options = { baseURL: `${process.env.GATEWAY_URL}/v1`, apiKey: process.env.GATEWAY_KEY, headers };
const models = {
  chat: () => createOpenAI(options).chat('m'),
  responses: () => createOpenAI(options).responses('m'),
  messages: () => createAnthropic(options)('m'),
  compatible: () =>
    createOpenAICompatible({ ...options, name: 'inferry', includeUsage: true, supportsStructuredOutputs: true })('m'),
};
const model = models[process.argv[2]]();
const weather = tool({
  description: 'The weather of a city',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `18 degrees in ${city}`,
});
const withTool = { model, prompt: 'Ask the weather tool for "Oslo"', tools: { weather }, stopWhen: stepCountIs(3) };
const described = ({ text, finishReason, usage }) => ({ text, finishReason, usage });

async function streamed(request) {
  const errors = [];
  const result = streamText({ ...request, onError: ({ error }) => errors.push(String(error)) });
  const types = new Set();
  let joined = '';
  for await (const part of result.fullStream) {
    types.add(part.type);
    if (part.type === 'text-delta') joined += part.text;
  }
  const [text, finishReason, usage, steps] = await Promise.all([
    result.text, result.finishReason, result.usage, result.steps,
  ]);
  return { ...described({ text, finishReason, usage }), joined, types: [...types], errors, steps: stepsOf(steps) };
}

function stepsOf(steps) {
  return steps.map((step) => ({
    calls: step.toolCalls.map(({ toolName, input }) => ({ toolName, input })),
    results: step.toolResults.map(({ output }) => output),
    text: step.text,
  }));
}

async function refused() {
  try {
    await generateText({ model, prompt: 'Hello', maxRetries: 0, headers: { 'x-inferry-lane': 'P9' } });
  } catch (error) {
    return { name: error.name, status: error.statusCode, message: error.message };
  }
}

async function aborted() {
  const controller = new AbortController();
  const result = streamText({ model, prompt: 'Write without an end', abortSignal: controller.signal });
  const types = [];
  for await (const part of result.fullStream) {
    types.push(part.type);
    if (part.type === 'text-delta') controller.abort();
  }
  return { last: types.at(-1) };
}

const schema = z.object({ name: z.string(), age: z.number() });
const tasks = {
  whole: async () => described(await generateText({ model, system: 'Be brief.', prompt: 'Hello', maxOutputTokens: 100 })),
  stream: () => streamed({ model, prompt: 'Hello' }),
  tools: async () => {
    const result = await generateText(withTool);
    return { ...described(result), steps: stepsOf(result.steps) };
  },
  streamedTools: () => streamed(withTool),
  object: async () =>
    (await generateText({ model, prompt: 'A person named "Ada" of 36 years', output: Output.object({ schema }) })).output,
  reasoning: async () => {
    const thinking = { type: 'enabled', budgetTokens: 1024 };
    const request = { model, prompt: 'Think, then say hello', providerOptions: { anthropic: { thinking } } };
    const whole = await generateText(request);
    const stream = streamText(request);
    return { whole: whole.reasoningText, streamed: await stream.reasoningText, text: await stream.text };
  },
  refused,
  aborted,
};
const found = {};
for (const name of process.argv.slice(3)) found[name] = await tasks[name]();
console.log(JSON.stringify(found));
